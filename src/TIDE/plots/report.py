"""A run as one HTML page that needs nothing else: the answer, every token in the colour of its depth, and figures below it.

Hovering or tapping a token shows its depth, the router's score and what the full model says in its place. With the keyboard,
tab leads to the answer and the arrows from token to token.
"""

from __future__ import annotations

import math
from collections import Counter
from html import escape
from pathlib import Path

from TIDE.plots.page import PAGE
from TIDE.plots.ramp import colour
from TIDE.run import Run, Token


def report(run: Run) -> str:
    """The page."""
    name = escape(Path(run.model).name)
    return PAGE.substitute(
        title=f"{name}, {escape(mode(run))}",
        name=name,
        how=escape(f"{mode(run)}; {run.backend}"),
        figures="".join(_figure(*figure) for figure in _figures(run)),
        prompt=escape(run.prompt),
        answer="".join(_token(token, run.num_layers, number == 0) for number, token in enumerate(run.tokens)),
        other=" Underlined: the full model says something else." if run.agreement < 1 else "",
        depths="\n".join(_depths(run)),
        steps=_steps(run),
        summary=escape(run.summary),
    )


def check_report(path: str | Path) -> None:
    """Raise where no page could be written to `path`: better before long work than after it."""
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"a report ends in .html, found {path.name!r}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to. Make it first.")


def write_report(run: Run, path: str | Path) -> None:
    check_report(path)
    Path(path).write_text(report(run), encoding="utf-8")


def mode(run: Run) -> str:
    return run.mode if run.mode == "exits off" else f"mode {run.mode}"


def verified_steps(run: Run) -> dict[int, float]:
    """Share of drafts that stood, by their number in a row. In mode fast they all do, for nobody looks."""
    return run.acceptance_by_step if run.mode == "exact" else {}


def where(depth: int, layers: int) -> str:
    """A depth in words."""
    if depth == layers:
        return f"all {layers} layers"
    return f"after {depth} of {layers} layers" if depth else "before the first layer"


def shown(text: str) -> str:
    """A token by itself: spaces and ends of lines are seen."""
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "(nothing)"


def _figures(run: Run) -> list[tuple[str, str]]:
    early = sum(token.depth < run.num_layers for token in run.tokens) / max(1, len(run.tokens))
    return [
        (f"{len(run.tokens)}", "tokens"),
        (f"{run.tokens_per_second:.1f}", "tokens per second"),
        (f"{early:.0%}", "left early"),
        (f"{run.mean_depth:.1f}", f"of {run.num_layers} layers, mean depth"),
        (f"{math.floor(1000 * run.agreement) / 10:g}%", "are the full model's"),  # 100 only if all are
    ]


def _figure(value: str, what: str) -> str:
    return f'<li><b>{escape(value)}</b><span class="soft">{escape(what)}</span></li>'


def _token(token: Token, layers: int, first: bool) -> str:
    same = token.text == token.full
    said = {
        "depth": where(token.depth, layers),
        "router score": "no exit let it out" if token.score is None else f"{token.score:.2f}",
        "full model": "the same" if same else shown(token.full),
    }
    tip = "\n".join([shown(token.text), *(f"{name}\t{value}" for name, value in said.items())])
    kinds = "token" + ("" if same else " other") + (" line" if token.text.startswith("\n") else "")
    return (
        f'<span class="{kinds}" tabindex="{0 if first else -1}" style="--depth: {_css(token.depth / layers)}" '
        f'data-tip="{escape(tip)}">{escape(token.text)}</span>'
    )


def _css(share: float) -> str:
    return f"rgb({' '.join(map(str, colour(share)))})"


def _depths(run: Run) -> list[str]:
    counts = Counter(token.depth for token in run.tokens)
    return [
        _row(where(depth, run.num_layers), count / len(run.tokens), f"{count}", _css(depth / run.num_layers))
        for depth, count in sorted(counts.items())
    ]


def _steps(run: Run) -> str:
    rows = [_row(f"draft {step}", share, f"{share:.0%}", "var(--soft)") for step, share in verified_steps(run).items()]
    if not rows:
        return ""
    return "<h2>Drafts that stood, by their number in a row</h2>\n" + "\n".join(rows) + "\n"


def _row(name: str, share: float, figure: str, fill: str) -> str:
    bar = f'<span class="bar" style="width: {100 * share:.1f}%; background: {fill}"></span>'
    return f'<div class="row"><span>{escape(name)}</span><span class="track">{bar}</span><span>{figure}</span></div>'
