from __future__ import annotations

import dataclasses

import pytest

from TIDE.run import Run, Token

WORDS = ("The sea rises and falls because the moon pulls at it, and the sun does so too, though from much further away. "
         "Tides are highest when both pull the same way.")  # fmt: skip


@pytest.fixture(scope="session")
def run():
    """A run with tokens of every kind: shallow, deep, the end of a line, one that differs, and one that looks like HTML."""
    depths = (0, 3, 8, 6, 8, 0, 0, 8)
    words = [(" " if number else "") + word for number, word in enumerate(WORDS.split())]
    tokens = [Token(word, depths[n % 8], None if depths[n % 8] == 8 else 0.25 + n / 100, word) for n, word in enumerate(words)]
    tokens[2] = Token(" rises", 8, None, " rises")
    tokens[3] = Token(" and", 6, 0.75, " then")
    tokens += [Token("\n\n", 0, 0.5, "\n\n"), Token("<script>$x", 8, None, "<script>$x")]
    return Run(
        model="org/Small-1B",
        mode="exact",
        backend="the model's own layers on cpu",
        num_layers=8,
        prompt="What is a <tide>?",
        tokens=tuple(tokens),
        tokens_per_second=12.34,
        acceptance_by_step={1: 0.75, 2: 0.5},
        summary="Total tokens: 33\n  Seconds: 2.755 (prompt 0.239, shallow 0.015, exits 0.186, deep 0.842, choosing 0.013)",
    )


@pytest.fixture(scope="session")
def chat(run):
    """A run longer than a window, as models chat: lists, code, an emoji of two tokens, and special tokens, one of them last."""
    odd = [" \n\n", "\n- ", ":\n", "```", "python", "\n", "    ", "x", "y" * 60, "\n", "```", "\r\n", "", "🍳", " ", " "]
    tokens = [
        *run.tokens * 5,
        *(Token(text, 6, 0.5, text) for text in odd),
        Token("<|tool|>", 3, 0.9, "<|tool|>", special=True),
    ]
    tokens += [*run.tokens[:20], Token("<|im_end|>", 8, None, "<|im_end|>", special=True)]
    return dataclasses.replace(run, tokens=tuple(tokens))
