"""Coloured text in a terminal: the background of each token shows the depth at which it was decided.

Without colours (`NO_COLOR`, or output that is not a terminal) tokens that exited early are put in brackets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer

from TIDE.plots.ramp import colour
from TIDE.server.text import Detokenizer, StopStrings


def has_colours() -> bool:
    return not os.environ.get("NO_COLOR") and (sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR")))


def show(text: str, nl: bool = True) -> None:
    """Print text that may hold colours."""
    typer.echo(text, nl=nl, color=has_colours())


def painted(text: str, depth: int, layers: int) -> str:
    """Return a piece of text in the colour of its depth."""
    if not has_colours():
        return text if depth == layers or not text.strip() else f"[{text}]"
    # Line by line, or the colour fills the rest of a line.
    ground = "\x1b[48;2;{};{};{}m\x1b[38;2;0;0;0m".format(*colour(depth / layers))
    return "\n".join(f"{ground}{line}\x1b[0m" if line else "" for line in text.split("\n"))


def legend(depths: Iterable[int], layers: int) -> str:
    """Return the names of the depths, each in its colour."""
    names = {0: "before the first layer", layers: f"all {layers} layers"}
    said = [painted(names.get(depth, f"after {depth} layers"), depth, layers) for depth in sorted({*depths})]
    return "decided " + ", ".join(said)


class Pieces:
    """The text of an answer, token by token: a character made of several tokens comes with the last of them.

    Args:
        stops: stop strings; the text ends before the first one.

    Attributes:
        shown: the text so far.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.ids: list[int] = []
        self.shown = ""
        self._text = Detokenizer(tokenizer, ())
        self._stops = StopStrings(stops)

    @property
    def has_stopped(self) -> bool:
        """True if a stop string was found."""
        return self._stops.found

    def of(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text that each token adds, up to the first stop string."""
        for token in tokens:
            yield self.add(token)
            if self.has_stopped:
                return
        yield self._release(self._stops.rest())

    def add(self, token: int) -> str:
        self.ids.append(token)
        return self._release(self._stops.add(self._text.add(token)))

    def _release(self, piece: str) -> str:
        self.shown += piece
        return piece
