"""Trees of drafts in CUDA graphs: the same text as without exits, in the dtype that models are used in. Skipped without a GPU.

PYTHONPATH=src:tests:tests/engine python -m pytest -o addopts="" tests/gpu
"""

from __future__ import annotations

import pytest
import torch

import TIDE
from families import VOCAB, build
from router_files import exits_of
from runners import Recording
from TIDE.config import TIDEConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

OPTIONS = dict(max_new_tokens=80, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", [dict(do_sample=False), dict(do_sample=True, temperature=0.7, top_p=0.9, seed=3)])
def test_trees_write_the_text_of_exits_off(dtype, rows, how):
    model = build("llama", num_hidden_layers=3).to("cuda", dtype)
    ids = torch.randint(3, VOCAB, (rows, 40), generator=torch.Generator().manual_seed(rows)).cuda()
    with TIDE.TIDE(model, exits_of(model, "memory", 0)) as engine:
        with engine.using(engine.config, exits=False):
            expected = engine.generate(ids, **OPTIONS, **how)
        for drafts in (7, 15, 31, 63):
            engine.scheduler = Recording((), 7)
            with engine.using(TIDEConfig(draft_tree=drafts, max_pending=7)):
                for _ in range(2):
                    assert torch.equal(engine.generate(ids, **OPTIONS, **how), expected)
                    assert engine.last_stats.trees


def test_trees_of_the_embedded_model_write_the_text_of_exits_off():
    model, tokenizer = TIDE.load_model("default", dtype=torch.bfloat16)
    asked = [{"role": "user", "content": "Why does the sea rise and fall twice a day?"}]
    kind = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = tokenizer.apply_chat_template(asked, **kind)["input_ids"].to(model.device)
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        with engine.using(engine.config, exits=False):
            expected = engine.generate(ids, max_new_tokens=200, do_sample=False)
        for drafts in (7, 15, 31, 63):
            engine.scheduler = Recording((), 7)  # in every round: how long rounds take on this GPU does not matter
            with engine.using(TIDEConfig(draft_tree=drafts)):
                for _ in range(2):
                    assert torch.equal(engine.generate(ids, max_new_tokens=200, do_sample=False), expected)
                stats = engine.last_stats
                assert stats.accepted > 0.4 * stats.total_tokens
