"""Certification: what passes is what the decoder really writes, in a fixed order, and mode fast goes by the result."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import TIDE
from policies import Everyone
from router_files import a_file, made
from runners import on_references
from TIDE import TIDEConfig
from TIDE.calibration.bounds import p_values
from TIDE.calibration.losses import LOSSES
from TIDE.routing.certificate import Certificate, Settings
from TIDE.routing.router_file import RouterFile, add_certificate

GRID = (0.99, 0.9, 0.5, 0.2)
LENIENT = dict(risk=0.2, confidence=0.8, max_new_tokens=8)  # 11 prompts are enough
SETTINGS = Settings("exact", 0, 5, 0.9, "float32")
HELD = Certificate(0.65, 0.05, 0.95, "rouge_l", 100, 64, SETTINGS)


class Sure(Everyone):
    """Leaves everywhere, always with the same score."""

    score_given = 0.7

    def score(self, candidates):
        return torch.full((len(candidates.rows),), self.score_given)


@pytest.fixture
def asked():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (4 + n % 5,), generator=generator).tolist() for n in range(12)]


def real_losses(model, policy, prompts, loss, **config) -> list[float]:
    """By an engine of its own, and by `model.generate`."""
    options, found = dict(max_new_tokens=8, do_sample=False), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        with TIDE.TIDE(model, policy, TIDEConfig(mode="fast", **config)) as engine:
            found.append(LOSSES[loss](engine.generate(ids, **options)[0, len(prompt) :].tolist(), full))
    return found


def test_rows_that_have_the_same_bits_together_are_certified_together(llama, asked, monkeypatch, tmp_path):
    """As on a GPU; elsewhere prompts are continued one by one."""
    counts, generate = [], TIDE.TIDE.generate
    monkeypatch.setattr(
        TIDE.TIDE, "generate", lambda self, ids, **own: counts.append(len(ids["input_ids"])) or generate(self, ids, **own)
    )
    found, path = [], tmp_path / "router.safetensors"
    a_file(llama, "memory", (0,), 0.0).save(path)
    for place in (lambda engine: engine, on_references):
        with place(TIDE.TIDE(llama, path, TIDEConfig(mode="fast"))) as engine:
            found.append(TIDE.certify(engine, asked, thresholds=GRID, **LENIENT))
    assert found[0] == found[1] and len(found[0].tested) > 1
    assert counts == [1] * (len(asked) * (1 + len(found[0].tested))) + [len(asked)] * (1 + len(found[1].tested))


@pytest.mark.parametrize("loss", ["rouge_l", "mismatch"])
def test_it_stops_at_the_first_threshold_that_fails_and_says_what_the_decoder_lost(llama, asked, loss):
    with TIDE.TIDE(llama, Sure(1)) as engine:
        before = engine.config, engine.policy, engine.plan
        found = TIDE.certify(engine, asked, loss=loss, thresholds=GRID, **LENIENT)
        assert (engine.config, engine.policy, engine.plan) == before
    assert found.threshold == 0.9
    assert [(row.threshold, row.passed) for row in found.tested] == [(0.99, True), (0.9, True), (0.5, False)]
    assert [row.mean_loss for row in found.tested[:2]] == [0.0, 0.0], "no token has a score of 0.9"
    expected = real_losses(llama, Sure(1), asked, loss, exit_threshold=0.5)
    assert found.tested[2].mean_loss == pytest.approx(sum(expected) / len(expected))
    assert found.tested[2].mean_loss > 0.3
    assert (found.loss, found.prompts, found.new_tokens) == (loss, 12, 8)
    assert found.tested[0].hoeffding_bentkus == p_values([0.0] * 12, 0.2, 0.8).hoeffding_bentkus


def test_the_settings_are_the_engines_own(llama, asked):
    config = TIDEConfig(mode="fast", kv_cache_strategy="zero_pad", max_pending=2, min_layers=1, exit_threshold=0.1)
    with TIDE.TIDE(llama, Sure(0, 1), config) as engine:
        found = TIDE.certify(engine, asked, thresholds=(0.5,), **LENIENT)
    assert found.settings == Settings("zero_pad", 1, 2, 0.9, "float32")
    expected = real_losses(
        llama, Sure(0, 1), asked, "rouge_l", kv_cache_strategy="zero_pad", max_pending=2, min_layers=1, exit_threshold=0.5
    )
    assert found.tested[0].mean_loss == pytest.approx(sum(expected) / len(expected))


def test_where_nothing_passes_it_is_never_and_mode_exact_is_recommended(llama, asked):
    with TIDE.TIDE(llama, Sure(1)) as engine:
        found = TIDE.certify(engine, asked, thresholds=(0.6, 0.5), **LENIENT)
    assert found.threshold is None
    assert len(found.tested) == 1
    assert 'Use mode "exact"' in found.summary()


def test_a_loss_of_the_user_sees_what_was_found_and_what_the_full_model_wrote(llama, asked):
    seen = []

    def too_long(found, full):
        seen.append((found, full))
        return 0.0

    with TIDE.TIDE(llama, Sure(1)) as engine:
        found = TIDE.certify(engine, asked, loss=too_long, thresholds=(0.99, 0.5), **LENIENT)
    assert (found.loss, found.threshold) == ("too_long", 0.5)
    assert all(one == other for one, other in seen[:12])
    assert any(one != other for one, other in seen[12:])
    with TIDE.TIDE(llama, Sure(1)) as engine, pytest.raises(ValueError, match="must give a number from 0 to 1, found 7"):
        TIDE.certify(engine, asked, loss=lambda found, full: 7, **LENIENT)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"risk": 0.05, "confidence": 0.95}, "12 prompts are too few: .* a risk of 0.05 with confidence 0.95 needs 72"),
        ({"risk": 0.0}, "risk must be a number between 0 and 1"),
        ({"confidence": 1.0}, "confidence must be a number between 0 and 1"),
        ({"thresholds": (0.5, 0.9)}, "thresholds must fall"),
        ({"thresholds": ()}, "thresholds must fall"),
        ({"loss": "bleu"}, "loss must be one of"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        ({"prompts": ["Hello"] * 12}, "there is no tokenizer"),
        ({"prompts": "Hello"}, "a list of prompts"),
        ({"prompts": [[]] * 12}, "the prompt is empty"),
    ],
)
def test_arguments_that_cannot_be_certified_are_refused(llama, asked, changes, said):
    options = LENIENT | {"prompts": asked} | changes
    with TIDE.TIDE(llama, Sure(1)) as engine, pytest.raises(ValueError, match=said):
        TIDE.certify(engine, **options)


def test_an_engine_without_exits_has_nothing_to_certify(llama, asked):
    with TIDE.TIDE(llama) as engine, pytest.raises(ValueError, match="no exits to certify. Make it with a router file"):
        TIDE.certify(engine, asked, **LENIENT)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_file_saved_certified_saved_again_and_loaded_gives_mode_fast_its_threshold(llama, asked, tmp_path, suffix):
    path, again = tmp_path / f"router.{suffix}", tmp_path / f"certified.{suffix}"
    made("lens").save(path)
    with TIDE.TIDE(llama, path) as engine:
        found = TIDE.certify(engine, asked * 2, loss=hundredth, thresholds=(0.8, 0.4), **LENIENT)
    assert found.threshold == 0.4 and found.tested[-1].mean_loss > 0
    file = RouterFile.load(path)
    assert file.certificate is None
    file.certificate = found
    file.save(again)
    assert RouterFile.load(again).certificate == found
    ids = torch.tensor([asked[4]])
    with TIDE.TIDE(llama, again, TIDEConfig(mode="fast")) as engine:
        assert engine.plan.threshold(0) == engine.plan.threshold(2) == found.threshold
        text = engine.generate(ids, max_new_tokens=8, do_sample=False)
    with TIDE.TIDE(llama, path, TIDEConfig(mode="fast", exit_threshold=found.threshold)) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False), text)


def hundredth(found, full):
    return LOSSES["mismatch"](found, full) / 100


def certified(tmp_path, **changes) -> str:
    file = made("lens")
    file.certificate = replace(HELD, **changes)
    file.save(tmp_path / "router.safetensors")
    return str(tmp_path / "router.safetensors")


def test_only_mode_fast_without_a_threshold_goes_by_the_certificate(llama, tmp_path, caplog):
    path = certified(tmp_path)
    for config, expected in (
        ({"mode": "fast"}, (0.65, 0.65)),
        ({"mode": "fast", "exit_threshold": 0.3}, (0.3, 0.3)),
        ({}, (0.5, 0.7)),
        ({"mode": "fast", "min_layers": 0, "max_pending": 5}, (0.65, 0.65)),
    ):
        with TIDE.TIDE(llama, path, TIDEConfig(**config)) as engine:
            assert (engine.plan.threshold(0), engine.plan.threshold(2)) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"kv_cache_strategy": "zero_pad"}, "kv_cache_strategy 'zero_pad' instead of 'exact'"),
        ({"min_layers": 1}, "min_layers 1 instead of 0"),
        ({"max_pending": 7}, "max_pending 7 instead of 5"),
    ],
)
def test_other_settings_are_named_in_a_warning_and_the_ordinary_threshold_is_used(llama, tmp_path, caplog, config, said):
    path = certified(tmp_path)
    with caplog.at_level(logging.WARNING), TIDE.TIDE(llama, path, TIDEConfig(mode="fast", **config)) as engine:
        assert engine.plan.threshold(2) == 0.95
    assert said in caplog.text and "Certify with these settings" in caplog.text


def test_another_dtype_is_another_setting(llama, tmp_path, caplog):
    path = certified(tmp_path, settings=SETTINGS._replace(dtype="bfloat16"))
    with caplog.at_level(logging.WARNING), TIDE.TIDE(llama, path, TIDEConfig(mode="fast")) as engine:
        assert engine.plan.threshold(2) == 0.95
    assert "dtype 'float32' instead of 'bfloat16'" in caplog.text


def test_a_certificate_that_allows_nothing_lets_nothing_out(llama, asked, tmp_path, caplog):
    path, ids = certified(tmp_path, threshold=None), torch.tensor([asked[0]])
    expected = llama.generate(ids, max_new_tokens=8, do_sample=False)
    with caplog.at_level(logging.WARNING), TIDE.TIDE(llama, path, TIDEConfig(mode="fast")) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=8, do_sample=False), expected)
        assert engine.last_stats.drafted == 0
    assert 'Use mode "exact"' in caplog.text


@pytest.mark.parametrize("compress", [True, False])
def test_adding_a_certificate_leaves_the_exits_as_they_are_stored(tmp_path, compress):
    from TIDE.routing import storage

    path, out = tmp_path / "router.safetensors", tmp_path / "out.safetensors"
    made().save(path, compress=compress)
    add_certificate(path, HELD, out)
    before, after = storage.read(path).tensors, storage.read(out).tensors
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    expected = RouterFile.load(path).as_dict() | {"certificate": RouterFile.load(out).certificate.as_dict()}
    assert RouterFile.load(out).as_dict() == storage.plain(expected)
    assert RouterFile.load(out).certificate == HELD
    with pytest.raises(ValueError, match="threshold from 0 to 1, found 2"):
        add_certificate(path, replace(HELD, threshold=2), path)


def test_the_summary_and_the_card_show_it():
    from TIDE.routing.certificate import Tested

    file = made("lens")
    assert "certificate" not in file.summary()
    assert "Certificate" not in file.generate_model_card().text
    file.certificate = replace(HELD, tested=(Tested(0.99, 0.001, 0.01, 0.02, True), Tested(0.65, 0.02, 0.03, 0.004, True)))
    summary, card = file.summary(), file.generate_model_card().text
    assert "\ncertificate\n" in summary and "settings.kv_cache_strategy  exact" in summary
    assert "thresholds tested" in summary and "0.65       0.02" in summary
    assert "## Certificate" in card and "| threshold | 0.65 |" in card and "| 0.65 | 0.02 | 0.03 | 0.004 | yes |" in card
    file.certificate = replace(HELD, threshold=None)
    assert "never exit" in file.summary()
