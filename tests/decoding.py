"""Decoding with a look inside afterwards, and rows by hand."""

from __future__ import annotations

from transformers import MaxLengthCriteria, StoppingCriteriaList

from TIDE import TIDEConfig
from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.loop import Loop
from TIDE.engine.plan import make_plan
from TIDE.engine.round.host_stage import HostStage
from TIDE.engine.round.sampler import Sampler
from TIDE.engine.row import Row
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.stop import StopRule


def rows_of(ids, num_layers: int, stop: StopRule | None = None) -> list[Row]:
    """A row for each of (rows, tokens) ids."""
    return [Row(text, stop or StopRule(), num_layers, index=index) for index, text in enumerate(ids.tolist())]


def decode(model, policy, ids, new_tokens: int, **config) -> HostStage:
    """Decode greedily through the model's own modules and hand back the stage with its rows and its cache."""
    adapter = ModelAdapter(model)
    plan = make_plan(TIDEConfig(**config), policy, adapter)
    stop = StopRule(StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + new_tokens)]))
    rows = rows_of(ids, adapter.num_layers, stop)
    scheduler = Scheduler()
    for row in rows:
        scheduler.admit(row, plan)
    stage = HostStage(ModuleRunner(adapter), plan, policy, rows, Sampler(rows), 16, scheduler.costs)
    for _ in Loop(stage, rows, plan, scheduler).run():
        pass
    adapter.close()
    return stage
