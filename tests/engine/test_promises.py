"""One table of promises: whichever runner decodes, in whichever mode, the text is the one that was promised.

    runner    modules · numba · triton, with the references in place of kernels · static modules, as on a GPU
    mode      exact: what `model.generate` writes, whatever the exits say
              fast: what the model's own modules write with the same exits
    rows      one · three, left-padded
    exits     none · heads of a router file · an `ExitPolicy` of the user's own

`make test` runs every pair of these, `make test-all` the whole table. Every case also says who decoded, and whether in whole
rounds or on the host: a silent fallback fails it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

from families import COMPILED, VOCAB, build
from levels import daily, pairwise
from policies import Knowing, texts_of
from router_files import a_file
from runners import RUNNERS, Recording
from TIDE import TIDE, TIDEConfig
from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.runners.static_modules import StaticModuleRunner
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.policies import policy_for

pytestmark = [pytest.mark.invariant(1), pytest.mark.invariant(3), pytest.mark.invariant(5)]

NEW, DRAFTS = 6, 3
HEADS = {  # of router files: strategy and checkpoints
    "memory at 0": ("memory", (0,)),
    "lens at 2": ("lens", (2,)),
    "identity at 2": ("identity", (2,)),
    "lens at 1 and 3": ("lens", (1, 3)),
}
EXITS = ["none", *HEADS, "own policy"]
CLOSELY = ["llama", "gemma3", "phi", "gpt2", "mixtral"]  # with all exits and rows
STATIC = [*CLOSELY, "gemma2", "olmo2", "gpt_neox", "opt", "falcon", "cohere"]
SERVES = {"modules": [*CLOSELY, "qwen3", "gemma2", "lfm2"], "numba": COMPILED, "triton": COMPILED, "static modules": STATIC}
FAST = ["llama", "gemma3", "gpt2"]


class Case(NamedTuple):
    runner: str
    mode: str
    rows: int
    family: str
    exits: str

    @property
    def in_whole_rounds(self) -> bool:
        if self.runner in ("modules", "numba") or self.exits == "own policy":
            return False
        if self.rows > 1 and self.runner != "triton":
            return False
        return self.mode == "exact" or self.exits != "lens at 1 and 3"  # mode fast asks one exit after the other


def cases():
    for runner, families in SERVES.items():
        for family in families:
            for rows in (1, 3):
                for exits in EXITS:
                    brief = exits == "none" or (exits == "memory at 0" and rows == 1)
                    if family in CLOSELY or brief:
                        yield Case(runner, "exact", rows, family, exits)
                    # numba has the heads of router files in 8 bits, so in mode fast their texts are its own
                    alike = exits == "own policy" if runner == "numba" else exits != "none"
                    if family in FAST and alike and runner != "modules":
                        yield Case(runner, "fast", rows, family, exits)


tiny = functools.cache(build)


@functools.cache
def prompts(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return dict(input_ids=ids * mask, attention_mask=mask)


def written(writer, rows: int) -> torch.Tensor:
    return writer.generate(**prompts(rows), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


@functools.cache
def by_the_model(family: str, rows: int) -> torch.Tensor:
    return written(tiny(family), rows)


@functools.cache
def of_a_file(family: str, exits: str, backend: str) -> CalibratedPolicy:
    strategy, checkpoints = HEADS[exits]
    adapter = ModelAdapter(tiny(family))
    policy = policy_for(a_file(adapter.model, strategy, checkpoints, 0.0), adapter)
    adapter.close()
    return policy


def policy_of(case: Case, backend: str):
    """The exits of a case, with heads as a backend has them."""
    if case.exits in HEADS:
        return of_a_file(case.family, case.exits, backend)
    texts = texts_of(by_the_model(case.family, case.rows), prompts(case.rows)["attention_mask"])
    return None if case.exits == "none" else Knowing(texts, (0, 2), seed=1, leaves=0.8, right=0.7)


def an_engine(case: Case, backend: str) -> TIDE:
    threshold = 0.0 if case.exits in HEADS else None
    limits = dict(max_exit_share=0.7) if case.mode == "fast" else {}
    config = TIDEConfig(mode=case.mode, exit_threshold=threshold, max_pending=DRAFTS, compaction_threshold=1.0, **limits)
    return TIDE(tiny(case.family), policy_of(case, backend), config)


@functools.cache
def by_modules(case: Case) -> torch.Tensor:
    """What mode fast writes; TIDE_BACKEND is modules."""
    with an_engine(case, "modules") as engine:
        return written(engine, case.rows)


@pytest.mark.parametrize("case", daily(cases(), pairwise([*cases()])), ids=lambda case: "-".join(map(str, case)))
def test_the_text_is_the_models(case, monkeypatch):
    backend = "numba" if case.runner == "numba" else "modules"
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    promised = by_the_model(case.family, case.rows) if case.mode == "exact" else by_modules(case._replace(runner="modules"))
    monkeypatch.setenv("TIDE_BACKEND", backend)
    with RUNNERS[case.runner](an_engine(case, backend)) as engine:
        runner, scheduler = engine.runner, Recording(then=DRAFTS if case.in_whole_rounds and case.mode == "exact" else None)
        engine.scheduler = scheduler
        for _ in range(2 if case.in_whole_rounds else 1):  # the second request works on the slots of the first
            assert torch.equal(written(engine, case.rows), promised)
        assert engine.runner is runner, engine.backend
        can = all(runner.why_not(row) is None for row in engine.last_rows)
        assert can == (case.runner in ("triton", "static modules"))
        assert bool(scheduler.rounds) == case.in_whole_rounds
        assert any(scheduler.rounds) == (case.in_whole_rounds and case.exits != "none")
        assert (engine.last_stats.drafted > 0) == (case.exits != "none")
        assert engine.last_stats.total_tokens == case.rows * NEW


def test_the_table_has_what_it_speaks_of():
    """Each runner has families it serves; those with compiled layers have some that they do not."""
    found = {(case.runner, case.mode, case.rows, case.exits) for case in cases()}
    exact = {(runner, "exact", rows, exits) for runner in RUNNERS for rows in (1, 3) for exits in EXITS}
    fast = {(runner, "fast", rows, "own policy") for runner in RUNNERS if runner != "modules" for rows in (1, 3)}
    assert exact | fast <= found
    assert set(SERVES) == set(RUNNERS)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_compiled_layers_are_refused_to_families_they_do_not_serve(family, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "numba")
    with pytest.raises(ValueError, match=r"would run as the model's own layers \(there is no compiled layer for"):
        TIDE(tiny(family))
    monkeypatch.delenv("TIDE_BACKEND")
    with TIDE(tiny(family)) as engine, pytest.raises(AssertionError, match="there is no compiled layer for"):
        RUNNERS["triton"](engine)


def test_a_static_cache_is_refused_to_layers_that_keep_a_running_state():
    adapter = ModelAdapter(tiny("lfm2"))
    assert StaticModuleRunner.why_not_for(adapter) == "some of its layers keep something else than K/V of their own"
    adapter.close()
