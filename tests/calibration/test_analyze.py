"""Analysis: every figure equals one computed the plain way, and the model is left as it was."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn import functional as F

import TIDE
from families import LAYERS
from TIDE.calibration import analyze as module
from TIDE.calibration.analyze import Analysis, _split, analyze
from TIDE.calibration.texts import load_texts

SAMPLES = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n\n".join(f"Document {n} is about {n * n} and the {'sea' if n % 2 else 'land'}." for n in range(40)))
    return str(path)


@pytest.fixture(scope="module")
def config(source):
    return TIDE.TIDEConfig(calibration_dataset=source, convergence_threshold=0.6, checkpoint_interval=2)


@pytest.fixture(scope="module")
def model(writer):
    return copy.deepcopy(writer)


@pytest.fixture(scope="module")
def plainly(model, plain, config):
    """(hits, cosines), each (depths 1 … L, tokens), from the model's own hidden states, text by text."""
    hits, cosines = [], []
    for text in load_texts(config.calibration_dataset, model, plain, SAMPLES, 0):
        last = []
        hook = model.model.layers[-1].register_forward_hook(lambda *args, last=last: last.append(args[2]))
        with torch.no_grad():
            out = model(torch.tensor([text.ids]), output_hidden_states=True)
            states = torch.stack([*(s[0] for s in out.hidden_states[1:-1]), last[0].view(out.hidden_states[0][0].shape)])
            tokens = model.lm_head(model.model.norm(states)).argmax(-1)
        hook.remove()
        asked = slice(text.start - 1, len(text.ids) - 1)
        hits.append((tokens == out.logits[0].argmax(-1))[:, asked])
        cosines.append(F.cosine_similarity(states, states[-1:], -1)[:, asked])
    return torch.cat(hits, 1), torch.cat(cosines, 1)


@pytest.fixture(scope="module")
def found(model, plain, config):
    return analyze(model, plain, config, samples=SAMPLES, heads=False)


def column(analysis, name):
    return {row["depth"]: row[name] for row in analysis.rows if row[name] is not None}


def test_cosine_and_identity_equal_the_models_own_hidden_states(found, plainly):
    hits, cosines = plainly
    assert found.tokens == hits.shape[1] and found.layers == LAYERS and found.texts == SAMPLES
    assert hits[-1].all()
    identity, cosine = column(found, "identity"), column(found, "cosine")
    assert list(identity) == list(cosine) == [1, 2, 3]
    for depth in identity:
        assert identity[depth] == pytest.approx(hits[depth - 1].float().mean().item())
        assert cosine[depth] == pytest.approx((cosines[depth - 1] > 0.6).float().mean().item())
    assert 0 < identity[1] < identity[3] < 1, "the test says something"


def test_the_oracle_leaves_where_identity_agrees_and_stays_so(found, plainly):
    hits, _ = plainly
    needed = [next(d for d in range(1, LAYERS + 1) if token[d - 1 :].all()) for token in hits.T]
    assert found.oracle_depth == {"identity": pytest.approx(sum(needed) / len(needed))}


def test_small_groups_count_the_same(found, model, plain, config, monkeypatch):
    monkeypatch.setattr(module, "GROUP_BYTES", 1)  # a text at a time
    alone = analyze(model, plain, config, samples=SAMPLES, heads=False)
    assert column(alone, "identity") == pytest.approx(column(found, "identity"))
    assert alone.oracle_depth == pytest.approx(found.oracle_depth)


def test_heads_are_measured_on_held_out_texts(model, plain, config):
    before, classes = {k: v.clone() for k, v in model.state_dict().items()}, [type(m) for m in model.modules()]
    trains = [p.requires_grad for p in model.parameters()]
    state = torch.get_rng_state()
    with_heads = analyze(model, plain, config, samples=SAMPLES, quick=True)

    texts = load_texts(config.calibration_dataset, model, plain, SAMPLES, 0)
    _, valid = _split(texts)
    assert with_heads.held_out_tokens == sum(len(text.ids) - text.start for text in valid) > 0
    assert list(column(with_heads, "lens")) == [2]
    assert list(column(with_heads, "memory")) == list(column(with_heads, "memory_last")) == [0, 2]
    assert column(with_heads, "identity") and 0 not in column(with_heads, "identity")
    shares = column(with_heads, "memory")
    assert all(0 <= share <= 1 for share in shares.values())
    # one candidate checkpoint: the oracle follows from the share
    share = column(with_heads, "lens")[2]
    assert with_heads.oracle_depth["lens"] == pytest.approx(2 * share + LAYERS * (1 - share))
    either = LAYERS * (1 - max(shares.values())) + 2 * max(shares.values())
    assert with_heads.oracle_depth["memory"] <= either + 1e-6

    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items()), "the model is unchanged"
    assert [type(m) for m in model.modules()] == classes
    assert [p.requires_grad for p in model.parameters()] == trains
    assert torch.equal(state, torch.get_rng_state()), "the user's random numbers are left alone"
    assert with_heads == analyze(model, plain, config, samples=SAMPLES, quick=True), "one seed, one analysis"


def test_the_model_is_closed_again_when_texts_cannot_be_read(model, plain, found):
    classes = [type(m) for m in model.modules()]
    with pytest.raises((OSError, ValueError)):
        analyze(model, plain, TIDE.TIDEConfig(calibration_dataset="/nowhere/texts.txt"))
    assert [type(m) for m in model.modules()] == classes


def test_too_few_texts_for_heads_are_refused_with_what_to_do(model, plain, config):
    with pytest.raises(ValueError, match="Give more samples"):
        analyze(model, plain, config, samples=1)
    with pytest.raises(ValueError, match="samples must be a whole number of at least 1, found 0"):
        analyze(model, plain, config, samples=0)


def test_it_is_written_as_json_and_shown_as_a_table(found, tmp_path):
    found.save(tmp_path / "analysis.json")
    assert Analysis(**json.loads((tmp_path / "analysis.json").read_text())) == found
    lines = found.table().splitlines()
    assert lines[2].split() == ["depth", "cosine", ">", "0.6", "identity"]
    assert len({len(line) for line in lines[2 : 3 + len(found.rows)]}) == 1
    assert f"{found.rows[0]['identity']:.1%}" in lines[3]
    assert lines[-1] == f"mean depth needed by an oracle, of {LAYERS}: identity {found.oracle_depth['identity']:.1f}"
