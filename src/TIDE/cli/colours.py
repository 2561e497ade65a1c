"""Coloured text in a terminal: the background of each token shows the depth at which it was decided.

Without colours (`NO_COLOR`, or output that is not a terminal) tokens that exited early are put in brackets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import typer

from TIDE.plots.ramp import colour


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
    """An incremental detokenizer: a character made of several tokens comes with the last of them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece
