"""Writing against `engine.generate`: the same texts, up to the same stop strings."""

from __future__ import annotations

import pytest
import torch

from TIDE.config import TIDEConfig
from TIDE.evals.writing import Stops, write

PROMPTS = ["two and two are", "Why", "a longer prompt than the others, by far"]


def generated(engine, ids, **options):
    engine.generate(torch.tensor([ids]), max_new_tokens=24, pad_token_id=0, **options)
    (row,) = engine.last_rows
    return row.new_tokens, row.stats.exited_tokens


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_texts_end_at_the_token_that_completes_a_stop_string(engine, plain, mode):
    with engine.using(TIDEConfig(mode=mode, exit_threshold=0.4)):
        prompts = [plain(prompt)["input_ids"] for prompt in PROMPTS]
        free = [generated(engine, ids)[0] for ids in prompts]
        stops = sorted({plain.decode(tokens[7:9]) for tokens in free} - {""})
        wanted = [generated(engine, ids, stop_strings=stops, tokenizer=plain) for ids in prompts]
        found = write(engine, prompts, Stops(plain, stops), do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert [one.ids for one in found] == [tokens for tokens, _ in wanted]
        assert any(len(one.ids) < 24 for one in found)
        if mode == "fast":  # drafts of mode exact depend on time
            assert [one.exited for one in found] == [exited for _, exited in wanted] and sum(one.exited for one in found)
        assert write(engine, prompts, None, do_sample=False, max_new_tokens=24, pad_token_id=0)[0].ids == free[0]


def test_a_stop_string_may_begin_in_the_prompt(plain):
    stops = Stops(plain, ["abc", "\n\nQ"])
    ids = [plain(text)["input_ids"] for text in ("ab", "abc", "xxabc", "abcd", "\n\nQ", "Q")]
    assert stops.complete(ids) == [False, True, True, False, True, False]
    assert stops.complete([]) == []


def test_sampled_texts_are_those_of_one_request(engine, plain):
    prompts = [plain(prompt)["input_ids"] for prompt in PROMPTS[:1] * 3]
    engine.generate(torch.tensor(prompts), do_sample=True, seed=0, max_new_tokens=12, pad_token_id=0)
    found = write(engine, prompts, None, do_sample=True, seed=0, max_new_tokens=12, pad_token_id=0)
    assert [one.ids for one in found] == [row.new_tokens for row in engine.last_rows]
    assert len({tuple(one.ids) for one in found}) > 1


def test_rows_leave_the_batch_when_writing_is_broken_off(engine, plain, monkeypatch):
    stops = Stops(plain, ["never written"])
    monkeypatch.setattr(stops, "complete", lambda texts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(engine, [plain(PROMPTS[0])["input_ids"]], stops, do_sample=False, max_new_tokens=24, pad_token_id=0)
    engine.step()
    assert engine._shared_batch().rows == []
