"""EAGLE-3 heads in CUDA graphs: the same text as without exits, and the drafts of the host. Skipped without a GPU.

PYTHONPATH=src:tests:tests/engine python -m pytest -o addopts="" tests/gpu
"""

from __future__ import annotations

import pytest
import torch

import TIDE
from arrivals import finish
from eagle_heads import config_of, fitted, tensors_of, with_vocabulary, write
from families import VOCAB, build
from runners import Recording, why_on_the_host
from TIDE.config import TIDEConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

DEVICE = "cuda"
OPTIONS = dict(max_new_tokens=60, eos_token_id=None, pad_token_id=0)
GREEDY, SAMPLED = dict(do_sample=False), dict(do_sample=True, temperature=0.7, top_p=0.9, seed=3)
DEPTHS = (1, 2, 4)


def folder_of(path, tensors, **more):
    return write(path, config_of("speculators", VOCAB, eagle_aux_hidden_state_layer_ids=list(DEPTHS), **more), tensors)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A head of EAGLE-3.1 that knows some of the model's text."""
    flags = dict(fc_norm=True, norm_output=True)
    return folder_of(tmp_path_factory.mktemp("good"), fitted(build("llama"), DEPTHS, **flags), **flags)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize("tree", [0, 15])
def test_rounds_write_the_text_of_exits_off(dtype, rows, how, tree, good):
    model = build("llama").to(DEVICE, dtype)
    ids = torch.randint(3, VOCAB, (rows, 40), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    with TIDE.TIDE(model, good, TIDEConfig(max_pending=7, draft_tree=tree)) as engine:
        with engine.using(engine.config, exits=False):
            expected = engine.generate(ids, **OPTIONS, **how)
        engine.scheduler = Recording((), 7)
        for _ in range(3):
            assert torch.equal(engine.generate(ids, **OPTIONS, **how), expected)
            assert engine.last_stats.drafted and bool(engine.last_stats.trees) == bool(tree)
        assert why_on_the_host(engine, ids, **OPTIONS, **how) is None
        assert "in CUDA graphs" in engine.backend and "host" not in engine.backend, engine.backend


@pytest.mark.parametrize("flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual")], ids=str)
def test_rounds_of_any_flags_and_a_draft_vocabulary_decide_as_the_host_does(flags, tmp_path, monkeypatch):
    """In mode fast, where drafts are the text, and in fp32, where near-ties are rare."""
    model, flags = build("llama"), dict.fromkeys(flags, True)
    some = torch.arange(VOCAB)[torch.arange(VOCAB) % 9 != 4]
    tensors = fitted(model, DEPTHS, **flags)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][some]
    head = folder_of(tmp_path, with_vocabulary(tensors, some, VOCAB), draft_vocab_size=len(some), **flags)
    model, start, found = model.to(DEVICE), torch.tensor([[1, 9, 30]]).to(DEVICE), []
    config = TIDEConfig(mode="fast", exit_threshold=0.1, max_pending=3, max_exit_share=0.8)
    for on_host in (False, True):
        with TIDE.TIDE(model, head, config) as engine:
            engine.scheduler = Recording((), 3)
            engine.generate(start, **OPTIONS, **GREEDY)
            if on_host:
                monkeypatch.setattr(type(engine.runner), "why_not", lambda self, row: "asked for")
            engine.scheduler.rounds.clear()
            text = engine.generate(start, **OPTIONS, **GREEDY)
            assert bool(engine.scheduler.rounds) != on_host
            found.append((text.tolist(), [own.depth for own in engine.last_rows[0].decided]))
    assert found[0] == found[1] and found[0][1].count(0) > 10


def test_a_head_of_random_weights_changes_no_text_of_late_and_early_rows(tmp_path):
    model = build("llama").to(DEVICE, torch.bfloat16)
    prompts = [
        torch.randint(3, VOCAB, (1, 30 + 7 * row), generator=torch.Generator().manual_seed(row)).to(DEVICE) for row in range(5)
    ]
    with TIDE.TIDE(model, folder_of(tmp_path, tensors_of()), TIDEConfig(max_pending=7)) as engine:
        with engine.using(engine.config, exits=False):
            alone = [engine.generate(ids, **OPTIONS, **GREEDY)[0].tolist() for ids in prompts]
        engine.scheduler = Recording((), 3)
        rows = []
        for ids in prompts:
            rows.append(engine.add(ids, **OPTIONS, **GREEDY))
            engine.step()
            engine.step()
        finish(engine, *rows)
        assert [row.tokens for row in rows] == alone and sum(row.stats.drafted for row in rows)
