"""A run as one self-contained HTML page: the answer, every token in the colour of its depth, and figures below it.

Hovering over or tapping a token shows its depth, the router's score and the full model's most likely token in a panel
beside it. On the keyboard, Tab moves to the answer and the arrow keys move between tokens.

`report.html` has the style sheet and the script. The panel never covers the answer: on a wide screen it sits beside the answer
and stays in view, on a narrow one at the bottom, and the page scrolls above it. Its height does not depend on its content, so
hovering over a token moves nothing. Text stays readable on every colour, in light and dark mode: `--shade` makes them pale.

Only words are coloured: a space may overhang the end of a line and a newline has no width, so colour would leave a stub there.
Newlines are shown as ↵ and special tokens with a label; the style sheet adds both, so text copied from the page has neither.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from TIDE.plots.figure import check_target
from TIDE.plots.ramp import colour
from TIDE.run import Run, Token

PIECE = re.compile(r"(?P<line>[\r\n]+)|(?P<gap>[^\S\r\n]+)|(?P<word>\S+)")
MARKS = str.maketrans({" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥"})
PAGE = Template((files("TIDE.plots") / "report.html").read_text("utf-8"))


def report(run: Run) -> str:
    """Return the page as HTML."""
    name = escape(Path(run.model).name)
    return PAGE.substitute(
        title=f"{name}, {escape(mode(run))}",
        name=name,
        how=escape(f"{mode(run)}; {run.backend}"),
        figures="".join(_figure(*figure) for figure in _figures(run)),
        prompt=escape(run.prompt),
        legend=legend(run),
        answer=answer(run),
        depths=_section("Tokens by depth", _depths(run)),
        steps=_section("Accepted drafts by position", _steps(run)),
        summary=escape(run.summary),
    )


def check_report(path: str | Path) -> None:
    """Raise if no page could be written to `path`: better before long work than after it."""
    check_target(path, (".html", ".htm"), "a report ends in .html")


def write_report(run: Run, path: str | Path) -> None:
    check_report(path)
    Path(path).write_text(report(run), encoding="utf-8")


def mode(run: Run) -> str:
    return run.mode if run.mode == "exits off" else f"mode {run.mode}"


def verified_steps(run: Run) -> dict[int, float]:
    """Return the share of drafts accepted, by position; empty in mode fast, which verifies none."""
    return run.acceptance_by_step if run.mode == "exact" else {}


def _figures(run: Run) -> list[tuple[str, str]]:
    if not run.tokens:
        return [("0", "tokens")]
    tree = [(f"{run.tree_width:.1f} × {run.tree_depth:.1f}", "mean width and depth of draft trees")] if run.tree_depth else []
    early = sum(token.depth < run.num_layers for token in run.tokens) / len(run.tokens)
    return [
        (f"{len(run.tokens)}", "token" if len(run.tokens) == 1 else "tokens"),
        (f"{run.tokens_per_second:.1f}", "tokens per second"),
        (f"{early:.0%}", "exited early"),
        (f"{run.mean_depth:.1f}", f"mean depth, of {run.num_layers} layers"),
        (f"{math.floor(1000 * run.agreement) / 10:g}%", "match the full model"),  # rounded down: 100 only if all match
        *tree,
    ]


def _figure(value: str, what: str) -> str:
    return f'<li><b>{escape(value)}</b><span class="soft">{escape(what)}</span></li>'


def _depths(run: Run) -> list[str]:
    counts = Counter(token.depth for token in run.tokens)
    return [
        _row(where(depth, run.num_layers), count / len(run.tokens), f"{count}", css(depth, run))
        for depth, count in sorted(counts.items())
    ]


def _steps(run: Run) -> list[str]:
    return [_row(f"draft {step}", share, f"{share:.0%}", "var(--soft)") for step, share in verified_steps(run).items()]


def _row(name: str, share: float, figure: str, fill: str) -> str:
    bar = f'<span class="bar" style="width: {100 * share:.1f}%; background: {fill}"></span>'
    return f'<div class="row"><span>{escape(name)}</span><span class="track">{bar}</span><span>{figure}</span></div>'


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([f"<h2>{title}</h2>", *rows]) if rows else ""


def answer(run: Run) -> str:
    """Return the tokens, each as a span with its details."""
    if not run.tokens:
        return '<span class="soft">(empty)</span>'
    return "".join(_token(run, place, is_code) for place, is_code in enumerate(_in_code(run)))


def legend(run: Run) -> str:
    """Return the depths that occur, in words, each with its colour."""
    depths = sorted({token.depth for token in run.tokens})
    items = [f'<i style="--depth: {css(depth, run)}"></i>{where(depth, run.num_layers)}' for depth in depths]
    if any(token.text != token.full for token in run.tokens):
        items.append('<u class="soft">abc</u>the full model’s most likely token is different')
    return "".join(f"<li>{item}</li>" for item in items)


def where(depth: int, layers: int) -> str:
    """Return a depth in words."""
    if depth == layers:
        return f"all {layers} layers"
    return f"after {depth} of {layers} layers" if depth else "before the first layer"


def css(depth: int, run: Run) -> str:
    """Return the colour of a depth in CSS notation."""
    return f"rgb({' '.join(map(str, colour(depth / run.num_layers)))})"


def _in_code(run: Run) -> Iterator[bool]:
    """Yield, for each token, True if it is in a fenced block of code."""
    text = ""
    for token in run.tokens:
        text += token.text
        yield text.count("```") % 2 == 1


def _token(run: Run, place: int, is_code: bool) -> str:
    token = run.tokens[place]
    kinds = "token" + (" code" if is_code else "") + (" other" if token.text != token.full else "")
    inside = _label(run, place) if token.special else _pieces(token.text)
    return (
        f'<span class="{kinds}" tabindex="{-1 if place else 0}" style="--depth: {css(token.depth, run)}" '
        f'data-tip="{escape(_details(token, run))}">{inside}</span>'
    )


def _pieces(text: str) -> str:
    """Return text as spans of words, gaps and ends of lines; a token without text of its own is an empty gap."""
    found = [(piece.lastgroup, escape(piece[0])) for piece in PIECE.finditer(text)] or [("part", "")]
    return "".join(f'<span class="{kind}">{piece}</span>' for kind, piece in found)


def _label(run: Run, place: int) -> str:
    is_end = all(token.special for token in run.tokens[place:])
    return f'<span class="label" data-label="{"end" if is_end else "special"}">{escape(run.tokens[place].text)}</span>'


def _details(token: Token, run: Run) -> str:
    """Return the text of the panel: the token, then a line for each name and value."""
    rows = {
        "depth": where(token.depth, run.num_layers),
        "router score": _score(token, run),
        "full model": "same token" if token.text == token.full else _shown(token.full),
    }
    head = _shown(token.text) + (" (special token)" if token.special else "")
    return "\n".join([head, *(f"{name}\t{value}" for name, value in rows.items())])


def _score(token: Token, run: Run) -> str:
    if token.score is not None:
        return f"{token.score:.2f}"
    if run.mode == "exits off":
        return "none (exits off)"
    return "none (ran all layers)" if token.depth == run.num_layers else "none"


def _shown(text: str) -> str:
    """Return the text of a token with visible spaces, tabs and newlines."""
    return text.translate(MARKS) or "(part of a character)"
