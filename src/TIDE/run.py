"""A run: one answer, token by token, with the depth of each. The input of figures and reports.

run = TIDE.record(engine, tokenizer, "Why is the sky blue?", max_new_tokens=64)
run.save("run.json")                            tide report run.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = 1


@dataclass(frozen=True)
class Token:
    """A token of the answer.

    Attributes:
        text: its own part of the answer; empty if it only begins a character that a later token completes.
        depth: number of layers run before it was decided.
        score: router score at its exit; None if it ran all layers.
        full: the full model's most likely token at this position, given the same text before it.
        special: True for a special token, such as the end of the answer, which is not text.
    """

    text: str
    depth: int
    score: float | None
    full: str
    special: bool = False


@dataclass(frozen=True)
class Run:
    """One answer, with its tokens, speed and statistics."""

    model: str
    mode: str
    backend: str
    num_layers: int
    prompt: str
    tokens: tuple[Token, ...]
    tokens_per_second: float
    acceptance_by_step: dict[int, float]
    summary: str
    tree_width: float = 0.0  # of trees of drafts: drafts in the widest level, on average
    tree_depth: float = 0.0

    @property
    def mean_depth(self) -> float:
        return sum(token.depth for token in self.tokens) / max(1, len(self.tokens))

    @property
    def agreement(self) -> float:
        """Share of the tokens that match the full model's most likely ones."""
        return sum(token.text == token.full for token in self.tokens) / max(1, len(self.tokens))

    def as_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a file written by `save`."""
        try:
            held = json.loads(Path(path).read_text("utf-8"))
        except ValueError:  # UnicodeDecodeError is one
            held = None
        if not _is_run(held):
            raise ValueError(
                f"{path} is not a run of this version: expected what tide generate --save writes (version {VERSION}), found "
                f"{'no JSON' if held is None else described(held)}."
            )
        try:
            tokens = tuple(Token(**token) for token in held["tokens"])
            steps = {int(step): share for step, share in held["acceptance_by_step"].items()}
            others = {name: value for name, value in held.items() if name not in ("version", "tokens", "acceptance_by_step")}
            return cls(tokens=tokens, acceptance_by_step=steps, **others)
        except (TypeError, AttributeError, ValueError, KeyError) as problem:
            raise ValueError(
                f"{path} is a damaged run: it has other fields than tide generate --save writes. Save it again."
            ) from problem


def described(held: Any) -> str:
    """Return what the JSON of a file is, as far as a tide command wrote it, and what to do with it."""
    if _is_run(held):
        return "a run, which tide report shows"
    if isinstance(held, dict):
        if "contenders" in held:
            return "results of tide bench, which are read as they are"
        if "tokens" in held:
            return f"a run of version {held.get('version', 'none')}"
    elif isinstance(held, list) and held and all(isinstance(message, dict) and "role" in message for message in held):
        return "a chat that tide chat saved"
    return "JSON of another kind"


def _is_run(held: Any) -> bool:
    return isinstance(held, dict) and held.get("version") == VERSION and "tokens" in held


def prepared(tokenizer: Any, prompt: str, raw: bool = False, system: str | None = None) -> Any:
    """Return a prompt as tensors, in the chat template if the tokenizer has one, unless `raw`."""
    if raw or tokenizer.chat_template is None:
        if system is not None:
            raise ValueError("a system prompt goes into a chat template, and there is none here. Write it into the prompt.")
        return tokenizer(prompt, return_tensors="pt")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
