"""What rounds cannot do, or fail at, the host does: the text is the same, and the reason is stated."""

from __future__ import annotations

import pytest
import torch

from families import build
from policies import Everyone
from runners import in_rounds, on_modules, why_on_the_host
from TIDE.engine.slots.round import SlotRound

OPTIONS = dict(max_new_tokens=16, do_sample=False, eos_token_id=None)


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def batch(prompts):
    """Three left-padded prompts."""
    return dict(zip(("input_ids", "attention_mask"), prompts, strict=True))


TOGETHER = {  # what several rows do -> how the engine is made, what is asked for, and why it is done on the host
    "logits": ({}, dict(return_dict_in_generate=True, output_logits=True), "its logits are to be returned"),
    "static modules": (dict(place=on_modules), {}, "its modules run whole rounds for one row at a time"),
}


@pytest.mark.parametrize("what", TOGETHER)
def test_what_rows_cannot_do_in_rounds_is_done_on_the_host_and_said(what, batch):
    model, (made, asked, why) = build("llama"), TOGETHER[what]
    options = {**OPTIONS, "pad_token_id": 0, "max_new_tokens": 8, **asked}
    with in_rounds(model, **made) as engine:
        assert why_on_the_host(engine, batch, **options) == why
        torch.manual_seed(0)
        found = engine.generate(**batch, **options)
        assert not engine.scheduler.rounds
        torch.manual_seed(0)
        expected = model.generate(**batch, **options)
        assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))


ALONE = {
    "an ExitPolicy": (dict(policy=Everyone(2)), {}, "its exits are an ExitPolicy of its own"),
    "skipped K/V": (
        dict(depth=2, strategy="identity", mode="fast", kv_cache_strategy="propagate"),
        {},
        "kv_cache_strategy='propagate' writes K/V after every exit",
    ),
    "many exits": (dict(depth=2, mode="fast", max_pending=16), {}, "max_pending=16 is more than a round has room for"),
    "an embedding": (dict(depth=0, strategy="identity"), {}, "its exit predicts from the embedding alone"),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_a_row_cannot_do_in_rounds_is_done_on_the_host_and_said(what, ids):
    made, asked, why = ALONE[what]
    with in_rounds(build("llama"), **made) as engine:
        assert why_on_the_host(engine, ids, **{**OPTIONS, **asked}) == why
        engine.generate(ids, **{**OPTIONS, **asked})
        assert not engine.scheduler.rounds
        reasons = {engine.runner.why_not(row) for row in engine.last_rows}
        assert reasons == ({why} if asked else {None})  # what has nothing to do with the row is the plan's


def refusing_after(good, monkeypatch):
    """Let the device refuse after so many good rounds; return the drafts of the rounds that were begun."""
    run, ran = SlotRound.deep_pass, []

    def fails(self, drafted):
        ran.append(drafted)
        if len(ran) > good:
            raise RuntimeError("the card refuses")
        run(self, drafted)

    monkeypatch.setattr(SlotRound, "deep_pass", fails)
    return ran


@pytest.mark.parametrize(("depth", "good"), [(None, 0), (0, 1), (2, 5), (0, 5)])
def test_where_a_round_fails_the_text_goes_on_by_steps(depth, good, ids, monkeypatch, caplog):
    model, ran = build("llama"), refusing_after(good, monkeypatch)
    with in_rounds(model, depth) as engine:
        for _ in range(20):  # how many rounds a request takes depends on its drafts, and they on what rounds cost
            assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
            if len(ran) > good:
                break
        assert engine.runner.why_not(engine.last_rows[0]) == "a round failed: RuntimeError: the card refuses"
        assert "the card refuses" in engine.backend
    assert len(ran) == good + 1
    assert "is not decoded in rounds: RuntimeError: the card refuses" in caplog.text


@pytest.mark.parametrize("good", [1, 3])
def test_max_exit_share_holds_when_a_round_fails(good, ids, monkeypatch):
    """Exits before the failure count: the row takes them along to the host."""
    model, ran = build("llama"), refusing_after(good, monkeypatch)
    with in_rounds(model, 2, mode="fast", exit_threshold=0.0, max_exit_share=0.3, max_pending=3) as engine:
        engine.generate(ids, **OPTIONS)
        (row,) = engine.last_rows
    assert len(ran) == good + 1 and row.stats.exited_tokens > 1
    early = 0
    for number, decided in enumerate(row.decided, 1):
        early += decided.depth < 4
        assert early <= 0.3 * number + 1e-9, number
