"""Attention for writing: the same texts as the model's own, without copies of K/V."""

from __future__ import annotations

import pytest
import torch

from TIDE.calibration import grouped_attention
from TIDE.calibration.grouped_attention import grouped


def written(model, prompts):
    ids, mask = prompts
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()


def test_every_family_writes_the_same_with_it(each_kind, prompts):
    alone, before = written(each_kind, prompts), each_kind.config._attn_implementation
    with grouped(each_kind):
        assert written(each_kind, prompts) == alone
    assert each_kind.config._attn_implementation == before


def test_single_tokens_attend_to_keys_that_were_not_copied(llama, prompts, monkeypatch):
    seen = []

    def spy(query, key, *args, **kwargs):
        seen.append((query.shape, key.shape))
        return torch.nn.functional.scaled_dot_product_attention(query, key, *args, **kwargs)

    monkeypatch.setattr(grouped_attention, "F", type("F", (), {"scaled_dot_product_attention": staticmethod(spy)}))
    with grouped(llama):
        written(llama, prompts)
    heads, shared = llama.config.num_attention_heads, llama.config.num_key_value_heads
    assert shared < heads and len(seen) == 7 * llama.config.num_hidden_layers  # the first token comes with the prompt
    assert {(query[1], query[2], key[1]) for query, key in seen} == {(shared, heads // shared, shared)}


def test_the_models_attention_comes_back_after_an_error(llama):
    with pytest.raises(RuntimeError, match="stop"), grouped(llama):
        raise RuntimeError("stop")
    assert llama.config._attn_implementation == "sdpa"
