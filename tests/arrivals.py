"""Rows that come and go: texts that arrive and leave, an engine that decodes them, and what each writes alone."""

from __future__ import annotations

import functools
from collections import Counter
from typing import NamedTuple

import torch
from transformers import LogitsProcessor

import TIDE
from families import VOCAB, build
from router_files import exits_of
from runners import on_references
from TIDE.engine.slots.drafter import exit_of
from TIDE.engine.slots.residents import Residents

LENGTH = dict(eos_token_id=None, pad_token_id=0)


class Doubled(LogitsProcessor):
    """Kernels do not know it, so it runs on the host."""

    def __call__(self, input_ids, scores):
        return scores * 2


KINDS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20),
    "penalised": dict(do_sample=True, repetition_penalty=1.5, frequency_penalty=0.5),
    "processed": dict(do_sample=True, logits_processor=[Doubled()]),
}


class Text(NamedTuple):
    """A prompt, how it is continued, and when."""

    prompt: int  # tokens
    new: int
    kind: str
    arrives: int = 0  # after so many steps
    leaves: int | None = None  # so many steps later, ended or not

    @property
    def ids(self) -> torch.Tensor:
        return torch.randint(3, VOCAB, (1, self.prompt), generator=torch.Generator().manual_seed(self.prompt))

    @property
    def options(self) -> dict:
        seed = {} if self.kind == "greedy" else {"seed": 7 * self.prompt}
        return dict(KINDS[self.kind], max_new_tokens=self.new, **LENGTH, **seed)


def a_model():
    """Three layers: an exit at depth 2 leaves one to skip."""
    return build("llama", num_hidden_layers=3)


model = functools.cache(a_model)


@functools.cache
def exits(strategy: str, depth: int):
    return exits_of(model(), strategy, depth)


@functools.cache
def an_engine(strategy: str | None, depth: int) -> TIDE.TIDE:
    """An engine that has answered before."""
    own = a_model()
    engine = on_references(TIDE.TIDE(own, None if strategy is None else exits_of(own, strategy, depth)))
    engine.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, **LENGTH)
    return engine


@functools.cache
def another_engine() -> TIDE.TIDE:
    return on_references(TIDE.TIDE(a_model()))


MOST_NEW = 9  # of most texts


@functools.cache
def alone(prompt: int, new: int, kind: str) -> list[int]:
    """What a row writes by itself, with exits off. A shorter text is the beginning of a longer one."""
    if new < MOST_NEW:
        return alone(prompt, MOST_NEW, kind)[: prompt + new]
    text = Text(prompt, new, kind)
    return another_engine().generate(text.ids, **text.options)[0].tolist()


def gib_of(engine: TIDE.TIDE, blocks: int) -> float:
    exit_ = None if engine.policy is None else exit_of(engine.plan, engine.policy)
    return blocks * engine.runner.pool.store(exit_).block_bytes / 2**30


def rows_put_back(monkeypatch) -> Counter:
    """Count the rows that have to leave when blocks run out, from now on."""
    found, reserve = Counter(), Residents.reserve

    def noting(self):
        rows = reserve(self)
        found.update(rows)
        return rows

    monkeypatch.setattr(Residents, "reserve", noting)
    return found


def finish(engine: TIDE.TIDE, *rows) -> None:
    """Decode until rows have ended."""
    for _ in range(2000):
        if all(row.finished for row in rows):
            return
        engine.step()
    raise AssertionError("rows do not get on")


def decoded(engine: TIDE.TIDE, texts: list[Text], **how) -> list[list[int]]:
    """Add texts when they arrive, take them out when they leave, and return what was written."""
    rows, step = {}, 0
    while len(rows) < len(texts) or not all(row.finished for row in rows.values()):
        for index, text in enumerate(texts):
            if text.arrives == step:
                rows[index] = engine.add(text.ids.to(engine.model.device), **text.options, **how)
            if text.leaves is not None and text.arrives + text.leaves == step:
                engine.remove(rows[index])
        engine.step()
        step += 1
        assert step < 100 * len(texts) + 1000, "rows do not get on"
    assert [row.error for row in rows.values()] == [None] * len(rows)
    return [rows[index].tokens for index in range(len(texts))]


def check(texts: list[Text], found: list[list[int]]) -> None:
    for text, own in zip(texts, found, strict=True):
        expected = alone(text.prompt, text.new, text.kind)
        assert own == expected if text.leaves is None else own == expected[: len(own)]
