"""One forward over given tokens, with an exit decision for each of them.

Mode "exact": the model's logits, in one pass. Mode "fast": for every token the logits the engine would choose from at that
place, which is found out by letting the engine itself write the given tokens, one after the other. The first token of a row
runs all layers, as a prompt does. Where prompts run in a pass of their own kind, all given tokens are one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.segments import Segments
from TIDE.engine.host.stage import HostStage
from TIDE.engine.loop import Loop
from TIDE.engine.request.plan import Plan
from TIDE.engine.rows.row import Draft, Row
from TIDE.engine.rows.stop import StopRule, Text
from TIDE.engine.runners.base import Runner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.routing.policy import ExitPolicy
from TIDE.stats import Clock, Seconds


def rows_of(plan: Plan, policy: ExitPolicy | None, ids: torch.Tensor, padding: list[int], num_layers: int) -> list[Row]:
    """Return a row for each of (rows, columns) texts; in mode "fast" it begins with the first token, and the others follow."""
    seconds = Seconds()
    is_script = _is_script(plan, policy)
    return [
        Row(text[:1] if is_script else text, _Script(text), num_layers, index=index, seconds=seconds)
        for index, text in enumerate(row[pad:] for row, pad in zip(ids.tolist(), padding, strict=True))
    ]


def forward(runner: Runner, plan: Plan, policy: ExitPolicy | None, rows: list[Row]) -> list[torch.Tensor]:
    """Run the texts of rows; return (tokens, vocabulary) logits for each."""
    with runner.grad_off():
        run = _as_decoded if _is_script(plan, policy) else _in_one_pass
        return run(runner, plan, policy, rows)


def _is_script(plan: Plan, policy: ExitPolicy | None) -> bool:
    return policy is not None and not plan.exact and plan.prompt_pass is None


def laid_out(logits: list[torch.Tensor], ids: torch.Tensor, padding: list[int]) -> torch.Tensor:
    """Return (rows, columns, vocabulary) logits, zeros where there is padding."""
    found = logits[0].new_zeros(*ids.shape, logits[0].shape[-1])
    for row, own in enumerate(logits):
        found[row, padding[row] :] = own
    return found.clone()  # an ordinary tensor, whatever mode it was made in


def output_of(
    model: PreTrainedModel, logits: torch.Tensor, labels: torch.Tensor | None, padding: list[int]
) -> CausalLMOutputWithPast:
    """Return what `model(input_ids)` returns."""
    return CausalLMOutputWithPast(loss=None if labels is None else loss_of(model, logits, labels, padding), logits=logits)


def loss_of(model: PreTrainedModel, logits: torch.Tensor, labels: torch.Tensor, padding: list[int]) -> torch.Tensor:
    """Return the model's own loss. Padding predicts nothing, so neither it nor the token after it counts."""
    labels = labels.clone()
    for row, pad in enumerate(padding):
        labels[row, : pad + 1 if pad else 0] = -100
    loss: torch.Tensor = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    return loss


def _in_one_pass(runner: Runner, plan: Plan, policy: ExitPolicy | None, rows: list[Row]) -> list[torch.Tensor]:
    clock = Clock(rows[0].stats.seconds)
    segments = Segments(runner, plan.spans, rows, max(row.size for row in rows), prompt_pass=plan.prompt_pass)
    counts, wanted = {row: row.size for row in rows}, dict.fromkeys(rows, 0)
    if plan.prompt_pass is not None:
        found = segments.run_prompts(counts, wanted)
    else:
        for segment in range(segments.last):
            segments.run(segment, counts)
        found = segments.run(segments.last, counts, wanted)
    least = runner.num_layers if plan.prompt_pass is None else plan.prompt_pass.depth
    for row in rows:
        for number in range(len(row.tokens)):
            row.stats.count_token(least if number < row.stats.settled_tokens else runner.num_layers)
    clock.lap("prompt")
    return [found[row] for row in rows]


def _as_decoded(runner: Runner, plan: Plan, policy: ExitPolicy | None, rows: list[Row]) -> list[torch.Tensor]:
    sampler = _Reader(rows)
    planner = Scheduler().planner(plan)
    stage = HostStage(runner, plan, policy, sampler, planner, len(rows))
    loop = Loop(stage, plan, planner)
    loop.add(rows)
    for _ in loop.run():
        pass
    return [torch.stack(own) for own in sampler.seen]


class _Script(StopRule):
    """Ends a row when the last of its given tokens has been continued."""

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.text = text

    def ends(self, row: Text) -> bool:
        return len(row.tokens) > len(self.text)


def text_of(row: Row) -> list[int]:
    """Return the given tokens of a scripted row."""
    assert isinstance(row.stop, _Script)
    return row.stop.text


class _Reader(Sampler):
    """Notes the logits it is shown and continues with the given tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(rows)
        self.seen: list[list[torch.Tensor]] = [[] for _ in rows]

    def takes_best_only(self, rows: list[Row]) -> bool:
        return False

    def sample(self, rows: list[Row], logits: torch.Tensor, depth: int, is_final: bool = True) -> dict[Row, Draft]:
        drafts = {}
        for row, own in zip(rows, logits, strict=True):
            self.seen[row.index].append(own)
            text = text_of(row)
            drafts[row] = Draft(text[row.size] if row.size < len(text) else 0, depth)
        return drafts
