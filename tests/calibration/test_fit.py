"""Fitting heads: the right gradient, nothing changed in the model, the best state kept, the same every time."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration import fit
from TIDE.calibration.collect import Budget, collect
from TIDE.calibration.fit import Exits, Schedule, Split, agreement, fit_head
from TIDE.calibration.text import Text
from TIDE.routing.eagle3.fresh import fresh_eagle_head
from TIDE.routing.heads import build_head, head_sizes, memory_depths, normed

DEPTH = 2


def some_texts(count: int, seed: int) -> list[Text]:
    chosen = random.Random(seed)
    return [Text([chosen.randrange(3, 120) for _ in range(chosen.randint(9, 16))], 4, i) for i in range(count)]


def a_split(adapter: ModelAdapter, folder: Path) -> Split:
    depths = [*memory_depths(adapter.num_layers, 3), DEPTH]
    budget = Budget(adapter.model.device, folder)
    return Split(*(collect(adapter, some_texts(24, seed), depths, budget, "") for seed in (1, 2)))


def a_head(adapter: ModelAdapter, strategy: str):
    torch.manual_seed(0)
    return build_head(strategy, head_sizes(strategy, adapter.model.config, adapter.hidden_dim))


@pytest.mark.parametrize("strategy", ["lens", "memory", "eagle3"])
def test_the_gradient_is_that_of_the_loss_in_the_docstring(adapter, strategy, tmp_path):
    split, vocabulary = a_split(adapter, tmp_path), torch.arange(0, 128, 2)
    head = fresh_eagle_head(adapter, vocabulary, 0) if strategy == "eagle3" else a_head(adapter, strategy)
    head = fit._trainable(head)
    schedule = Schedule(positions=10**6, draft_steps=2, jitter=0.0)
    shard, rows = split.train.shards[0], torch.arange(8)
    with fit.frozen(adapter.model):
        fit._backward(
            adapter, head, shard, rows, Exits(DEPTH, vocabulary), schedule, fit.Dice(torch.Generator(), torch.Generator())
        )
        trained = {name: parameter for name, parameter in head.named_parameters() if name != "lm_head.weight"}
        found = {name: parameter.grad.clone() for name, parameter in trained.items()}
        head.zero_grad()
        learned = shard.learned[rows]
        deep = shard.states(adapter.num_layers)[rows][learned]
        full = adapter.head(deep, vocabulary).log_softmax(-1).clone()
        loss = 0.0
        for step, guess in enumerate(fit.guesses(adapter, head, shard, rows, DEPTH, 2)):
            logs = fit.exit_logits(adapter, head, guess[learned], vocabulary, with_grad=True).log_softmax(-1)
            state = F.smooth_l1_loss(normed(guess[learned]), normed(deep))
            loss = loss + 0.8**step * (F.kl_div(logs, full, log_target=True, reduction="batchmean") + 0.5 * state)
        loss.backward()
    assert getattr(head, "lm_head", None) is None or head.lm_head.weight.grad is None
    for name, parameter in trained.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_training_helps_and_leaves_the_model_alone(adapter, tmp_path):
    split, head = a_split(adapter, tmp_path), a_head(adapter, "memory")
    before = {name: weight.clone() for name, weight in adapter.model.state_dict().items()}
    trainable = [parameter.requires_grad for parameter in adapter.model.parameters()]
    schedule = Schedule(epochs=30, least_steps=0, batch_tokens=128, positions=128, draft_steps=2, learning_rate=2e-3)
    start = agreement(adapter, head, split.train, Exits(DEPTH, None), 2)
    fitted = fit_head(adapter, head, Split(split.train, split.train), Exits(DEPTH, None), schedule, 0, "")
    assert fitted.agreement[0] > start[0] + 0.3
    assert fitted.agreement == agreement(adapter, fitted.head, split.train, Exits(DEPTH, None), 2), (
        "the state it was measured in"
    )
    assert all(torch.equal(weight, before[name]) for name, weight in adapter.model.state_dict().items())
    assert [parameter.requires_grad for parameter in adapter.model.parameters()] == trainable
    assert all(parameter.grad is None for parameter in adapter.model.parameters())


def test_the_best_state_on_held_out_prompts_is_kept(adapter, tmp_path, monkeypatch):
    split, head = a_split(adapter, tmp_path), a_head(adapter, "memory")
    told = iter([[0.2], [0.5], [0.3], [0.4], [0.45]])
    monkeypatch.setattr(fit, "agreement", lambda *_: next(told))
    schedule = Schedule(epochs=5, least_steps=0, batch_tokens=512, checks=5, patience=2)
    fitted = fit_head(adapter, head, split, Exits(DEPTH, None), schedule, 0, "")
    assert fitted.agreement == [0.5]
    assert next(told) == [0.45], "two looks without progress end the training"


def test_the_same_seed_gives_the_same_head(adapter, tmp_path):
    split = a_split(adapter, tmp_path)
    schedule = Schedule(epochs=2, least_steps=0, batch_tokens=128)
    found = [fit_head(adapter, a_head(adapter, "memory"), split, Exits(DEPTH, None), schedule, 7, "").head for _ in range(2)]
    for one, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one, other)


def rates_of(make, steps: int) -> list[float]:
    """The learning rate at each step."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("steps", range(1, 25))
def test_any_number_of_steps_has_learning_rates(steps):
    found = rates_of(lambda optimizer: fit._one_cycle(optimizer, 1e-3, steps), steps)
    assert all(0 <= rate <= 1.0001e-3 for rate in found) and found[-1] < 1e-6
    if steps != 10:  # where torch's own divides by zero
        cycle = partial(
            torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-3, total_steps=steps, pct_start=0.1, cycle_momentum=False
        )
        assert found == rates_of(cycle, steps), "runs that worked stay as they were"


def test_ten_steps_train_a_head(adapter, tmp_path):
    split, head = a_split(adapter, tmp_path), a_head(adapter, "memory")
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    fitted = fit_head(adapter, head, split, Exits(DEPTH, None), Schedule(steps=10, batch_tokens=128), 0, "")
    assert any(not torch.equal(weight, before[name]) for name, weight in fitted.head.state_dict().items())


def test_states_on_disk_are_those_in_memory(adapter, tmp_path):
    texts, depths = some_texts(24, 3), [DEPTH, adapter.num_layers]
    roomy, tight = Budget(adapter.model.device, tmp_path), Budget(adapter.model.device, tmp_path)
    tight.left = 0
    kept, stored = (collect(adapter, texts, depths, budget, "") for budget in (roomy, tight))
    assert list(tmp_path.glob("*.safetensors"))
    for one, other in zip(kept.shards, stored.shards, strict=True):
        assert all(torch.equal(one.states(depth), other.states(depth)) for depth in depths)
        assert torch.equal(one.best, other.best)


def test_collected_states_are_the_models_hidden_states(adapter, tmp_path):
    texts = some_texts(6, 4)
    shard = collect(adapter, texts, [0, DEPTH, adapter.num_layers], Budget(adapter.model.device, tmp_path), "").shards[0]
    row = shard.lengths.index(max(shard.lengths))
    ids = shard.ids[row : row + 1, : shard.lengths[row]]
    out = adapter.model(ids, output_hidden_states=True)
    for depth in (0, DEPTH):
        torch.testing.assert_close(shard.states(depth)[row, : ids.shape[1]], out.hidden_states[depth][0])
    assert torch.equal(shard.best[row, : ids.shape[1]], out.logits[0].argmax(-1))
    assert int(shard.asked.sum()) == sum(len(text.ids) - text.start for text in texts)
