"""Decoding with a look inside afterwards, and rows by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from TIDE import TIDEConfig
from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.stage import HostStage
from TIDE.engine.loop import Loop
from TIDE.engine.request.plan import make_plan
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.engine.runners.numba import NumbaRunner
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.select import checked, described_layers
from TIDE.engine.slots.stage import SlotStage
from TIDE.kernels.dispatch import cpu_layers
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import sampling
from TIDE.prompt_exits.prefill import prompt_exit_of, prompt_pass


def rows_of(ids, num_layers: int, stop: StopRule | None = None) -> list[Row]:
    """A row for each of (rows, tokens) ids."""
    return [Row(text, stop or StopRule(), num_layers, index=index) for index, text in enumerate(ids.tolist())]


def decode(model, policy, ids, new_tokens: int, **config) -> HostStage:
    """Decode greedily through the model's own modules and hand back the stage with its rows and its cache."""
    adapter = ModelAdapter(model)
    asked = TIDEConfig(**config)
    exit_ = prompt_exit_of(policy, adapter)
    plan = replace(make_plan(asked, policy, adapter), prompt_pass=prompt_pass(asked, policy, exit_, adapter))
    stop = StopRule(StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + new_tokens)]))
    rows = rows_of(ids, adapter.num_layers, stop)
    planner = Scheduler().planner(plan)
    stage = HostStage(ModuleRunner(adapter), plan, policy, Sampler(), planner, len(rows))
    stage.leave = lambda row: None  # K/V of rows that have ended are looked at
    loop = Loop(stage, plan, planner)
    loop.add(rows)
    for _ in loop.run():
        pass
    adapter.close()
    return stage


def on_modules(adapter: ModelAdapter) -> Runner:
    return ModuleRunner(adapter)


def on_numba(adapter: ModelAdapter) -> Runner:
    return checked(NumbaRunner(adapter, described_layers(adapter), cpu_layers()))


def on_references(adapter: ModelAdapter) -> Runner:
    """The Triton runner, with the references in place of kernels."""
    return checked(TritonRunner(adapter, described_layers(adapter), reference, reference, sampling))


class Script(Scheduler):
    """Gives rounds the draft lengths of a list, the same in every loop.

    Args:
        lengths: of each round after the prompt's, and over again.
        within: no more than there is room for, as far as the host knows the text.
    """

    def __init__(self, lengths: Sequence[int], within: bool = True) -> None:
        super().__init__()
        self.lengths = lengths
        self.within = within
        self._launched: Counter[Row] = Counter()  # rounds of each row

    def planner(self, plan):
        return _Scripted(self, plan)

    def length(self, row, plan):
        """The drafts of a row's next round."""
        self._launched[row] += 1
        at = self._launched[row] - 2
        if at < 0 or len(plan.spans) == 1:
            return 0  # the prompt's, or there are no exits
        length = min(self.lengths[at % len(self.lengths)], plan.max_pending)
        return min(length, max(0, row.stop.room(row) - 1)) if self.within else length


class _Scripted(DraftPlanner):
    def __init__(self, script, plan):
        super().__init__(script.experience, plan)
        self.script = script

    def drafts(self, row, is_planned):
        return self.script.length(row, self.plan)


def in_a_loop(runner, policy, ids, new_tokens, scheduler, *, device=False, overlap=False, end=None, **config) -> list[Row]:
    """Decode rows greedily in one kind of loop, and hand the rows back.

    Args:
        device: in rounds that are launched as a whole; otherwise on the host.
        overlap: read a round while the next one runs.
        end: an end token.
    """
    plan = make_plan(TIDEConfig(**config), policy, runner.adapter)
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + new_tokens)])
    if end is not None:
        criteria.append(EosTokenCriteria(end))
    rows = rows_of(ids, runner.num_layers, StopRule(criteria))
    planner = scheduler.planner(plan)
    if device:
        stage = SlotStage(runner, plan, policy, Sampler(rows))
    else:
        stage = HostStage(runner, plan, policy, Sampler(), planner, len(rows))
    loop = Loop(stage, plan, planner, overlap)
    loop.add(rows)
    for _ in loop.run():
        pass
    if device:
        stage.close()
    return rows
