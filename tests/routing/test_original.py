"""Files of the original system run; a wrong, damaged or hostile one is an error that says so."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

from families import build
from router_files import original_file
from TIDE import TIDE, TIDEConfig
from TIDE.routing.certificate import Certificate, Settings
from TIDE.routing.router import Router
from TIDE.routing.router_file import RouterFile

GREEDY = dict(do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=0)


@pytest.fixture
def file(tmp_path):
    return original_file(tmp_path / "router.pt")


@pytest.fixture
def ids():
    return torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(0))


def test_files_of_the_original_system_run(llama, ids, file):
    expected = llama.generate(ids, **GREEDY)
    with TIDE(llama, file, TIDEConfig(min_layers=0)) as engine:
        assert torch.equal(engine.generate(ids, **GREEDY), expected)
        assert engine.last_stats.drafted > 0
    with TIDE(llama, str(file), TIDEConfig(mode="fast", min_layers=0)) as engine:
        engine.generate(ids, **GREEDY)
        assert set(engine.last_stats.exits_per_layer) <= {0, 2}
        assert 0 < engine.last_stats.exit_rate < 1


def test_a_router_is_the_formula_of_the_original(file):
    weights = torch.load(file, weights_only=True)["router_layers"][2]
    router = Router(64, 8)
    router.load_state_dict(weights, strict=False)  # temperature and offset are ours
    states = torch.randn(5, 64)
    expected = torch.sigmoid(torch.nn.functional.silu(states @ weights["down.weight"].T) @ weights["up.weight"].T)[:, 0]
    torch.testing.assert_close(router(states), expected)
    torch.testing.assert_close(router(states.bfloat16()), expected, atol=0.05, rtol=0.05)


def test_a_file_of_the_original_is_a_router_file(file):
    held = RouterFile.load(file)
    assert (held.strategy, held.checkpoints, held.vocabulary, held.fingerprint, held.config) == (
        "identity",
        (1, 3),
        None,
        None,
        {},
    )
    assert held.facts == {"origin": "tide-inference 0.2.1"}
    assert held.version == "0.2.1"
    assert [(exit.threshold, exit.router.signals, exit.sizes.hidden_dim) for exit in held.exits.values()] == [(0.85, 0, 64)] * 2


def test_it_can_be_saved_in_the_new_form_and_runs_the_same(llama, ids, file, tmp_path):
    RouterFile.load(file).save(tmp_path / "new.safetensors")
    texts = []
    for path in (file, tmp_path / "new.safetensors"):
        with TIDE(llama, path, TIDEConfig(mode="fast", min_layers=0)) as engine:
            texts.append(engine.generate(ids, **GREEDY))
            assert engine.plan.exit_threshold == 0.85
            assert engine.last_stats.exit_rate > 0
    assert torch.equal(*texts)


def test_its_own_defaults_are_those_of_the_original(llama, file):
    """min_layers 8 leaves a model of four layers no exit; the threshold is 0.85."""
    with TIDE(llama, file) as engine:
        assert engine.plan.exit_threshold == 0.85
        assert len(engine.plan.spans) == 1


def test_its_certificate_is_that_of_mode_fast(llama, file):
    held = RouterFile.load(file)
    held.certificate = Certificate(0.7, 0.05, 0.95, "rouge_l", 100, 64, Settings("exact", 0, 5, 0.9, "float32"))
    with TIDE(llama, held, TIDEConfig(mode="fast")) as engine:
        assert engine.policy.certificate is held.certificate


def test_a_router_after_the_last_layer_is_left_out_and_said_so(llama, tmp_path, caplog):
    path = original_file(tmp_path / "router.pt", layers=(1, 3))
    with caplog.at_level(logging.WARNING, logger="TIDE"), TIDE(llama, path, TIDEConfig(min_layers=0)) as engine:
        assert [span.start for span in engine.plan.spans] == [0, 2]
    assert "a router after the last layer" in caplog.text


@pytest.mark.parametrize(("layers", "hidden"), [((0, 2), 32), ((2, 9), 64)])
def test_a_file_for_another_model_is_refused_with_both_named(llama, tmp_path, layers, hidden):
    path = original_file(tmp_path / "router.pt", layers, hidden)
    with pytest.raises(
        ValueError, match=rf"states of {hidden} and routers at layers .*; this model has states of 64 and 4 layers"
    ):
        TIDE(llama, path)
    TIDE(llama).close()


class Hostile:
    def __reduce__(self):
        return print, ("code was run",)


def bad_files(folder, whole: bytes):
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_text("not a file of tensors")
    (folder / "hostile.pt").write_bytes(pickle.dumps({"hidden_dim": 64, "router_layers": Hostile()}))
    torch.save({"hidden_dim": 64, "router_layers": Hostile(), "bottleneck_dim": 8}, folder / "hostile-zip.pt")
    torch.save({"weights": torch.ones(2)}, folder / "other.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save(
        {"hidden_dim": 64, "bottleneck_dim": 8, "router_layers": {0: {"down.weight": torch.ones(3, 3)}}}, folder / "sizes.pt"
    )
    torch.save({"hidden_dim": 64, "bottleneck_dim": 8, "router_layers": 7}, folder / "kind.pt")
    torch.save({"hidden_dim": "x", "bottleneck_dim": 8, "router_layers": {}}, folder / "word.pt")
    torch.save({"hidden_dim": 64, "bottleneck_dim": 8, "router_layers": {}}, folder / "none.pt")
    endless = {"down.weight": torch.ones(8, 64), "up.weight": torch.ones(1, 8)}
    torch.save({"hidden_dim": 64, "bottleneck_dim": float("inf"), "router_layers": {0: endless}}, folder / "endless.pt")
    small = {"down.weight": torch.ones(8, 64), "up.weight": torch.ones(1, 8)}
    broken = dict(small, **{"up.weight": torch.full((1, 8), float("nan"))})
    torch.save({"hidden_dim": 64, "bottleneck_dim": 8, "router_layers": {0: broken}}, folder / "nan.pt")
    one = torch.zeros(1)
    wide = {"down.weight": one.expand(1 << 31, 1 << 31), "up.weight": one.expand(1, 1 << 31)}
    torch.save({"hidden_dim": 1 << 31, "bottleneck_dim": 1 << 31, "router_layers": {0: wide}}, folder / "wide.pt")
    again = {layer: {name: weight.view_as(weight) for name, weight in small.items()} for layer in range(20)}
    torch.save({"hidden_dim": 64, "bottleneck_dim": 8, "router_layers": again}, folder / "again.pt")
    torch.save({"hidden_dim": 10**15, "bottleneck_dim": 10**15, "router_layers": {0: small}}, folder / "huge.pt")


BAD = {
    "truncated.pt": "was not loaded: it is truncated",
    "empty.pt": "was not loaded",
    "text.pt": "was not loaded",
    "hostile.pt": "holds more than tensors and plain values",
    "hostile-zip.pt": "holds more than tensors and plain values",
    "other.pt": r"is not a router file: expected the entries .*, found \['weights'\]",
    "list.pt": "is not a router file: .* found list",
    "sizes.pt": "is damaged: its routers do not fit its sizes",
    "kind.pt": "is damaged",
    "endless.pt": "is damaged: its routers do not fit its sizes",
    "word.pt": "is damaged",
    "huge.pt": "is damaged: its routers do not fit its sizes",
    "nan.pt": "is damaged: .*a weight is not a finite number",
    "wide.pt": "is damaged: .*a number of their own in the file",
    "again.pt": "is damaged: .*a number of their own in the file",
    "none.pt": "holds no routers",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_and_nothing_of_them_runs(tmp_path, file, name, capsys):
    model = build("llama")
    bad_files(tmp_path, file.read_bytes())
    with pytest.raises(ValueError, match=BAD[name]):
        TIDE(model, tmp_path / name)
    assert "code was run" not in capsys.readouterr().out
    TIDE(model, file).close()
