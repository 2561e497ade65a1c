"""Calibration from trained heads, and EAGLE-3 heads of our own: what comes out loads, drafts and can be exported."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

import TIDE
from eagle_heads import a_head, config_of, tensors_of, with_vocabulary, write
from families import FAMILIES, KINDS, build
from levels import daily
from router_files import a_file, original_file
from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration import calibrate as module
from TIDE.calibration.fit import Fitted
from TIDE.calibration.start import Start
from TIDE.config import TIDEConfig
from TIDE.routing.eagle3.export import export
from TIDE.routing.eagle3.fresh import check_model, fresh_depths, fresh_eagle_head
from TIDE.routing.eagle3.head import EagleHead
from TIDE.routing.policies import for_model
from TIDE.routing.router import Router
from TIDE.routing.source import load_router

IDS = torch.tensor([[1, 20, 30, 40, 50]])


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "QUICK", replace(module.QUICK, answer=16))


@pytest.fixture
def trained(monkeypatch):
    """A trained head is kept whether it agrees more often or not: a few steps are too few to tell."""
    monkeypatch.setattr(module, "_better", lambda begun, fitted, depth: fitted)


def calibrated(llama, chatty, path, start=None, **config):
    config = TIDEConfig(calibration_samples=20, checkpoint_interval=2, **config)
    return TIDE.calibrate(llama, chatty, path, config, quick=True, epochs=1, start=start)


def check_it_drafts_and_exports(model, path, tmp_path):
    """The text is the model's, drafts are made, and the exported head is read again as the same one."""
    expected = model.generate(IDS, max_new_tokens=16, do_sample=False)
    with TIDE.TIDE(model, path, TIDEConfig(exit_threshold=0.0, max_pending=3)) as engine:
        assert torch.equal(engine.generate(IDS, max_new_tokens=16, do_sample=False), expected)
        assert engine.last_stats.drafted > 0
        file = engine.file
    export(file, tmp_path / "exported")
    with TIDE.TIDE(model, tmp_path / "exported") as engine:
        again = engine.file.exits[0]
        assert torch.equal(engine.generate(IDS, max_new_tokens=16, do_sample=False), expected)
    assert again.sizes == file.exits[0].sizes
    for name, tensor in file.exits[0].head.state_dict().items():
        torch.testing.assert_close(again.head.state_dict()[name].float(), tensor.float())


@pytest.mark.usefixtures("trained")
def test_a_published_head_is_trained_on_and_gets_a_router(llama, chatty, tmp_path):
    config = config_of("original", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    tensors = with_vocabulary(tensors_of(48, fc_norm=True), torch.arange(0, 96, 2))
    head, path = write(tmp_path / "head", config | {"fc_norm": True}, tensors), tmp_path / "router.safetensors"
    file = calibrated(llama, chatty, path, head)
    assert file.strategy == file.config["exit_strategy"] == "eagle3" and file.facts["start"] == str(head)
    assert file.vocabulary.tolist() == list(range(0, 96, 2)) and "draft_vocabulary" not in file.figures
    (own,) = TIDE.RouterFile.load(path).exits.values()
    assert isinstance(own.head, EagleHead) and isinstance(own.router, Router)
    assert not torch.equal(own.head.fc.weight.float(), tensors["fc.weight"]), "it was trained"
    rows = own.head.lm_head.weight.float()
    torch.testing.assert_close(rows, tensors["lm_head.weight"], rtol=0.02, atol=0.02, msg="its LM head stays as it was")
    check_it_drafts_and_exports(llama, path, tmp_path)


def test_a_head_that_was_replaced_is_not_resumed_with(llama, chatty, tmp_path, monkeypatch):
    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Job, "run", stopped)
    path, config = tmp_path / "router.safetensors", config_of("original", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    head = write(tmp_path / "head", config, tensors_of())
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            TIDE.calibrate(llama, chatty, path, start=head, quick=True, resume=resume)
    write(head, config, tensors_of(seed=1))
    with pytest.raises(ValueError, match=r"was begun with other settings \(start\)"):
        TIDE.calibrate(llama, chatty, path, start=head, quick=True, resume=True)


def test_an_eagle3_head_is_trained_from_nothing_and_can_be_exported(llama, chatty, tmp_path):
    path = tmp_path / "router.safetensors"
    file = calibrated(llama, chatty, path, exit_strategy="eagle3")
    assert list(file.exits) == [0] and isinstance(file.exits[0].head, EagleHead)
    check_it_drafts_and_exports(llama, path, tmp_path)


@pytest.mark.usefixtures("trained")
def test_exits_of_a_file_are_trained_on_at_their_depths(llama, chatty, tmp_path):
    start, path = tmp_path / "start.safetensors", tmp_path / "router.safetensors"
    a_file(llama, "memory", (2,), 0.5).save(start)
    file = calibrated(llama, chatty, path, start)
    assert list(file.exits) == [2] and file.facts["start"] == str(start)
    before = TIDE.RouterFile.load(start).exits[2].head.state_dict()
    after = file.exits[2].head.state_dict()
    assert torch.equal(after["deep_spread"].float(), before["deep_spread"].bfloat16().float()), (
        "its inputs are as it knows them"
    )
    assert not torch.equal(after["fuse.weight"].float(), before["fuse.weight"].bfloat16().float())


def test_a_head_that_gets_worse_is_kept_as_it_was():
    begun, worse, better = (Fitted(torch.nn.Identity(), [share, share]) for share in (0.5, 0.4, 0.6))
    assert module._better(begun, worse, 0) is begun
    assert module._better(begun, better, 0) is better


def test_a_head_of_a_model_of_the_same_sizes_may_be_trained_on(tmp_path):
    a_file(build("qwen2"), "lens", (2,), 0.5).save(tmp_path / "other.pt")
    adapter = ModelAdapter(build("llama"))
    start = Start(adapter, TIDEConfig(), 0, tmp_path / "other.pt")
    assert (start.strategy, start.depths()) == ("lens", [2])
    adapter.close()


@pytest.mark.parametrize(
    ("what", "config", "said"),
    [
        ("identity", {}, "its exits are identity exits, which have no weights to train"),
        ("original", {}, "its exits are identity exits, which have no weights to train"),
        ("other sizes", {}, "its head at depth 2 has the sizes"),
        ("other depth", {}, "it was made for 6 layers and this model has 4"),
        ("lens", {"exit_strategy": "eagle3"}, "it has lens heads and exit_strategy is 'eagle3'"),
        ("head of another model", {}, "was made for another model: it has states of 32"),
        ("lens", {"min_layers": 3}, "no checkpoint is left: its exits are shallower, and min_layers is 3"),
        ("head", {"min_layers": 3}, "no checkpoint is left: an EAGLE-3 head stands before the first layer"),
    ],
)
def test_exits_that_cannot_be_trained_further_are_refused_in_one_line(what, config, said, llama, tmp_path):
    path = tmp_path / "start.pt"
    if what == "original":
        original_file(path, hidden=llama.config.hidden_size)
    elif what == "head":
        path = a_head(tmp_path / "head")
    elif what == "head of another model":
        path = write(tmp_path / "head", config_of("speculators", dim=32), tensors_of(dim=32))
    else:
        other = {"other sizes": {"hidden_size": 32}, "other depth": {"num_hidden_layers": 6}}.get(what, {})
        a_file(build("llama", **other), what if what in ("identity", "lens") else "memory", (2,), 0.5).save(path)
    adapter = ModelAdapter(llama)
    with pytest.raises(ValueError, match=said) as error:
        Start(adapter, TIDEConfig(**config), 0, path)
    assert len(str(error.value).splitlines()) == 1
    adapter.close()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (dict(num_hidden_layers=4), "it was made for 8 layers and this model has 4"),
        (dict(num_hidden_layers=10), "it was made for 8 layers and this model has 10"),
        (dict(num_hidden_layers=8, vocab_size=200), "a vocabulary of 128 tokens, this model has 200"),
        (dict(num_hidden_layers=8, hidden_size=32), "it has states of 64, this model has states of 32"),
        (dict(name="gpt2", n_layer=8), "this model changes them before its first layer"),
    ],
)
@pytest.mark.parametrize("has_vocabulary", [True, False])
def test_a_saved_eagle3_file_is_compared_with_the_model_before_any_work(other, said, has_vocabulary, tmp_path):
    tensors = with_vocabulary(tensors_of(48), torch.arange(0, 96, 2)) if has_vocabulary else tensors_of()
    write(tmp_path / "head", config_of("original", eagle_aux_hidden_state_layer_ids=[2, 4, 5]), tensors)
    with closing(ModelAdapter(build("llama", num_hidden_layers=8))) as adapter:
        for_model(load_router(tmp_path / "head"), adapter).save(tmp_path / "router.pt")
    with closing(ModelAdapter(build(**{"name": "llama"} | other))) as adapter:
        with pytest.raises(ValueError, match=said) as error:
            Start(adapter, TIDEConfig(), 0, tmp_path / "router.pt")
        assert len(str(error.value).splitlines()) == 1 and "router.pt" in str(error.value)
    with closing(ModelAdapter(build("qwen2", num_hidden_layers=8))) as adapter:
        assert Start(adapter, TIDEConfig(), 0, tmp_path / "router.pt").depths() == [0], "another model of the same sizes"


@pytest.mark.parametrize("name", daily(FAMILIES, KINDS))
def test_a_fresh_eagle3_head_has_the_models_logits_or_is_refused(name):
    model, dice = build(name), torch.Generator().manual_seed(0)
    for own, weight in model.named_parameters():
        if "norm" in own:
            weight.data += 0.3 * torch.randn(weight.shape, generator=dice)
    with closing(ModelAdapter(model)) as adapter, torch.no_grad():
        try:
            check_model(adapter)
        except ValueError:
            assert name not in ("llama", "qwen3", "qwen3_next", "gemma2", "gemma3", "granite", "mixtral", "gpt_oss")
            return
        states = torch.randn(200, adapter.hidden_dim, generator=dice) + 0.7
        expected, found = adapter.head(states), fresh_eagle_head(adapter, None, 0).logits(states)
    assert torch.equal(expected.argmax(-1), found.argmax(-1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", "before its first layer"),
        ("stablelm", "an RMS norm and a product"),
        ("cohere2", "an RMS norm and a product"),
        ("nemotron", "an RMS norm and a product"),
    ],
)
def test_models_that_no_eagle3_head_is_made_for_are_named(name, said):
    adapter = ModelAdapter(build(name))
    with pytest.raises(ValueError, match=f"no EAGLE-3 head can be trained for .*{said}.*Use exit_strategy='memory'"):
        Start(adapter, TIDEConfig(exit_strategy="eagle3"), 0, None)
    adapter.close()


def test_a_fresh_head_remembers_the_depths_of_eagle3_where_there_are_enough_layers():
    assert fresh_depths(30) == (2, 15, 27)
    assert fresh_depths(7) == (2, 3, 4)
    assert fresh_depths(4) == (1, 3, 4)
