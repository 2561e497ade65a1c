"""The answer of a run as HTML: its tokens in the colours of their depths, and the legend of the colours.

Only words are coloured: a space may overhang the end of a line and a newline has no width, so colour would leave a stub there.
Newlines are shown as ↵ and special tokens with a label; the style sheet adds both, so text copied from the page has neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from TIDE.plots.ramp import colour
from TIDE.run import Run, Token

PIECE = re.compile(r"(?P<line>[\r\n]+)|(?P<gap>[^\S\r\n]+)|(?P<word>\S+)")
MARKS = str.maketrans({" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥"})


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
