"""A run as one HTML page that needs nothing else: the answer, every token in the colour of its depth, and figures below it.

Hovering, tapping or tabbing to a token shows its depth, the router's score and what the full model says in its place.
"""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path

from TIDE.plots.ramp import colour
from TIDE.run import Run, Token

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1b1f24; --paper: #fdfdfb; --soft: #6a7280; --line: #d8dce2; --shade: 42%; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8eaee; --paper: #15181d; --soft: #9aa3b0; --line: #333a44; --shade: 55%; }}
}}
body {{ margin: 0 auto; max-width: 46rem; padding: 1.2rem; color: var(--ink); background: var(--paper);
  font: 17px/1.65 system-ui, sans-serif; }}
h1 {{ font-size: 1.35rem; margin: 0 0 .2rem; }}
h2 {{ font-size: 1.05rem; margin: 1.8rem 0 .5rem; }}
.soft {{ color: var(--soft); font-size: .92rem; }}
.prompt {{ border-left: 3px solid var(--line); padding-left: .8rem; white-space: pre-wrap; }}
.answer {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.token {{ background: color-mix(in srgb, var(--depth) var(--shade), transparent); border-radius: 3px; cursor: default; }}
.token:hover, .token:focus {{ outline: 2px solid var(--ink); outline-offset: 1px; }}
.token.other {{ text-decoration: underline wavy; text-underline-offset: 4px; }}
#tip {{ position: absolute; display: none; max-width: 17rem; padding: .5rem .7rem; border: 1px solid var(--line);
  border-radius: 6px; background: var(--paper); box-shadow: 0 4px 14px rgb(0 0 0 / .25); font-size: .88rem; line-height: 1.45;
  pointer-events: none; }}
.row {{ display: grid; grid-template-columns: 11rem 1fr 6.5rem; gap: .6rem; align-items: center; font-size: .92rem; }}
.bar {{ display: block; height: .9rem; border-radius: 3px; }}
pre {{ overflow-x: auto; font-size: .82rem; border: 1px solid var(--line); border-radius: 6px; padding: .7rem; }}
@media (max-width: 30rem) {{ .row {{ grid-template-columns: 7.5rem 1fr 5rem; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="soft">{subtitle}</p>
<h2>Prompt</h2>
<p class="prompt">{prompt}</p>
<h2>Answer</h2>
<p class="answer">{answer}</p>
<p class="soft">Colours: the depth at which a token was decided. Hover, tap or tab to a token for more.{other}</p>
<h2>Where tokens were decided</h2>
{depths}
{steps}<h2>In numbers</h2>
<pre>{summary}</pre>
<div id="tip" role="tooltip"></div>
<script>
const tip = document.getElementById("tip");
function show(event) {{
  const token = event.target.closest(".token");
  if (!token) {{ tip.style.display = "none"; return; }}
  tip.innerText = token.dataset.tip;
  tip.style.display = "block";
  const box = token.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 12);
  tip.style.left = Math.max(8, left) + window.scrollX + "px";
  tip.style.top = box.bottom + 6 + window.scrollY + "px";
}}
for (const kind of ["mouseover", "focusin", "click"]) document.addEventListener(kind, show);
</script>
</body>
</html>
"""


def report(run: Run) -> str:
    """The page."""
    answer = "".join(_token(token, run.num_layers) for token in run.tokens)
    other = " Wavy: not what the full model says." if run.agreement < 1 else ""
    return PAGE.format(
        title=f"{escape(Path(run.model).name)}, mode {escape(run.mode)}",
        subtitle=escape(
            f"{len(run.tokens)} tokens, {run.tokens_per_second:.1f} per second, mean depth {run.mean_depth:.1f} of "
            f"{run.num_layers} layers; {run.agreement:.1%} are the full model's. {run.backend}."
        ),
        prompt=escape(run.prompt),
        answer=answer,
        other=other,
        depths=_depths(run),
        steps=_steps(run),
        summary=escape(run.summary),
    )


def write_report(run: Run, path: str | Path) -> None:
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"a report ends in .html, found {path.name!r}.")
    path.write_text(report(run), encoding="utf-8")


def _token(token: Token, layers: int) -> str:
    said = [f"{token.text!r}", where(token.depth, layers)]
    if token.score is not None:
        said.append(f"router score {token.score:.2f}")
    said.append("the full model says the same" if token.text == token.full else f"the full model says {token.full!r}")
    other = "" if token.text == token.full else " other"
    tip = escape("\n".join(said), quote=True).replace("\n", "&#10;")
    return (
        f'<span class="token{other}" tabindex="0" style="--depth: {_css(token.depth / layers)}" data-tip="{tip}">'
        f"{escape(token.text)}</span>"
    )


def where(depth: int, layers: int) -> str:
    if depth == layers:
        return f"decided after all {layers} layers"
    return f"decided after {depth} of {layers} layers" if depth else "decided before the first layer"


def _css(share: float) -> str:
    return f"rgb({' '.join(map(str, colour(share)))})"


def _depths(run: Run) -> str:
    counts = Counter(token.depth for token in run.tokens)
    rows = []
    for depth, count in sorted(counts.items()):
        share = count / len(run.tokens)
        name = f"after {depth} layers" if depth else "before the first"
        rows.append(_row(name, share, f"{count} ({share:.1%})", _css(depth / run.num_layers)))
    return "\n".join(rows)


def _steps(run: Run) -> str:
    if not run.acceptance_by_step:
        return ""
    rows = [_row(f"draft {step}", share, f"{share:.1%}", "var(--soft)") for step, share in run.acceptance_by_step.items()]
    return "<h2>Drafts that stood, by their number in a row</h2>\n" + "\n".join(rows) + "\n"


def _row(name: str, share: float, figure: str, fill: str) -> str:
    bar = f'<span class="bar" style="width: {100 * share:.1f}%; background: {fill}"></span>'
    return f'<div class="row"><span>{escape(name)}</span><span>{bar}</span><span>{figure}</span></div>'
