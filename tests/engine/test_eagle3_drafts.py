"""Imported EAGLE-3 heads in the engine: whatever their weights, the text is the model's."""

from __future__ import annotations

import pytest
import torch

from arrivals import finish
from eagle_heads import Reference, a_head, config_of, fitted, tensors_of, with_vocabulary, write
from families import build
from policies import texts_of
from TIDE import TIDE, Conversation, TIDEConfig
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.memory import HeadMemory

DRAFT = TIDEConfig(exit_threshold=0.0)  # whatever the head says
GREEDY = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
SAMPLED = dict(max_new_tokens=10, do_sample=True, temperature=0.9, top_k=40, seed=7, pad_token_id=0)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3", "phi3", "olmo2", "granite", "falcon", "mixtral", "cohere"]


@pytest.fixture(autouse=True)
def drafts_whatever_they_cost(monkeypatch):
    """Let no row rest from drafting because it takes long."""
    monkeypatch.setattr(CalibratedPolicy, "weighs", False)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_heads_change_no_text(name, prompts, tmp_path):
    """Greedy: that of `model.generate`; sampled: that of exits off with the same seed."""
    model, (ids, mask) = build(name), prompts
    greedy = model.generate(ids, attention_mask=mask, **GREEDY)
    with TIDE(model) as engine:
        sampled = engine.generate(ids, attention_mask=mask, **SAMPLED)
    with TIDE(model, a_head(tmp_path), DRAFT) as engine:
        assert texts_of(engine.generate(ids, attention_mask=mask, **GREEDY), mask) == texts_of(greedy, mask)
        assert engine.last_stats.drafted > 0
        assert torch.equal(engine.generate(ids, attention_mask=mask, **SAMPLED), sampled)
        assert engine.last_stats.drafted > 0
        alone = ids[:1, int((mask[0] == 0).sum()) :]
        assert torch.equal(engine.generate(alone, **GREEDY), model.generate(alone, **GREEDY))


@pytest.mark.parametrize("backend", ["modules", "numba"])
@pytest.mark.parametrize("flags", [(), ("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual"), ("vocabulary",)])
def test_random_heads_change_no_text_on_either_runner(backend, flags, llama, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    ids, mask = prompts
    if flags == ("vocabulary",):
        some = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:48]
        config = config_of("speculators", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
        head = write(tmp_path, config, with_vocabulary(tensors_of(48), some))
    else:
        head = a_head(tmp_path, layout="speculators", **dict.fromkeys(flags, True))
    expected = llama.generate(ids, attention_mask=mask, **GREEDY)
    with TIDE(llama, head, DRAFT) as engine:
        assert engine.runner.name == backend
        assert texts_of(engine.generate(ids, attention_mask=mask, **GREEDY), mask) == texts_of(expected, mask)
        assert engine.last_stats.drafted > 0
        if flags == ("vocabulary",):
            assert engine.policy.vocabulary.tolist() == sorted(some.tolist())


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model and a head whose drafts are often right."""
    model = build("llama")
    tensors = fitted(model, (1, 2, 4))
    config = config_of("speculators", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    return model, write(tmp_path_factory.mktemp("good"), config, tensors)


def test_good_drafts_are_accepted_and_the_text_stays_the_models(good):
    model, head = good
    start = torch.tensor([[1], [1]])
    sampled = dict(max_new_tokens=40, do_sample=True, temperature=0.7, top_k=0, seed=3, pad_token_id=0)
    with TIDE(model) as engine:
        expected = [
            engine.generate(start, max_new_tokens=40, do_sample=False, pad_token_id=0),
            engine.generate(start, **sampled),
        ]
    with TIDE(model, head, TIDEConfig(exit_threshold=0.0, max_pending=3)) as engine:
        assert torch.equal(engine.generate(start, max_new_tokens=40, do_sample=False, pad_token_id=0), expected[0])
        assert engine.last_stats.accepted > 0
        assert torch.equal(engine.generate(start, **sampled), expected[1])
        assert engine.file.exits[0].figures["agreement"] > 0.6


@pytest.mark.parametrize(("of_model", "of_head"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_a_head_takes_on_the_dtype_of_its_model(of_model, of_head, tmp_path):
    model = build("llama").to(getattr(torch, of_model))
    tensors = {name: one.to(getattr(torch, of_head)) for name, one in tensors_of(fc_norm=True).items()}
    head = write(tmp_path, config_of("speculators", eagle_aux_hidden_state_layer_ids=[1, 2, 3]), tensors)
    ids = torch.tensor([[5, 17, 80, 31, 9, 44]])
    with TIDE(model) as engine:
        expected = engine.generate(ids, **GREEDY)
    with TIDE(model, head, DRAFT) as engine:
        assert torch.equal(engine.generate(ids, **GREEDY), expected)
        assert engine.last_stats.drafted > 0
        assert engine.policy.exits[0].head.fc.weight.dtype == model.dtype
        engine.file.save(tmp_path / "router.safetensors")


def test_a_conversation_goes_on_with_what_the_head_remembers(good):
    model, head = good
    with TIDE(model, head, DRAFT) as engine:
        conversation = Conversation(engine)
        first = torch.tensor([[1, 9, 30, 77]])
        text = torch.cat([first, torch.tensor([list(conversation.stream(first, **GREEDY))])], 1)
        again = torch.cat([text, torch.tensor([[5, 6]])], 1)
        found = list(conversation.stream(again, **GREEDY))
    assert found == model.generate(again, **GREEDY)[0, again.shape[1] :].tolist()


@pytest.mark.invariant(5)
def test_rows_that_come_and_go_are_those_that_are_alone(good):
    model, head = good
    prompts = [[1], [5, 17, 80, 31], [1, 9]]
    settings = [dict(do_sample=False), dict(do_sample=True, temperature=0.7, seed=5), dict(do_sample=False)]
    with TIDE(model) as engine:
        options = dict(max_new_tokens=14, pad_token_id=0, eos_token_id=None)
        alone = [engine.generate(torch.tensor([ids]), **own, **options)[0] for ids, own in zip(prompts, settings, strict=True)]
    with TIDE(model, head, TIDEConfig(exit_threshold=0.0, max_pending=3)) as engine:
        rows = []
        for ids, own in zip(prompts, settings, strict=True):
            rows.append(engine.add(torch.tensor([ids]), **own, **options))
            engine.step()
            engine.step()
        finish(engine, *rows)
        assert sum(row.stats.accepted for row in rows) > 0
    for row, ids, text in zip(rows, prompts, alone, strict=True):
        assert row.new_tokens == text[len(ids) :].tolist()


def test_first_drafts_in_the_engine_are_those_of_the_reference(llama, tmp_path, monkeypatch):
    ids, seen, places, guess = torch.tensor([[5, 17, 80, 31, 9, 44]]), [], [], HeadMemory.guess
    monkeypatch.setattr(HeadMemory, "guess", lambda self, rows, at: places.append(at) or guess(self, rows, at))
    with TIDE(llama, a_head(tmp_path, layout="speculators"), TIDEConfig(exit_threshold=0.0, max_pending=1)) as engine:
        start = engine.policy.start

        def started(rows, head):
            request = start(rows, head)
            judge = request.judge
            request.judge = lambda *given: seen.append(judge(*given)) or seen[-1]
            return request

        engine.policy.start = started
        text = engine.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    assert seen
    parts = [llama(text[None], output_hidden_states=True).hidden_states[depth][0] for depth in (1, 2)]
    parts.append(last_states(llama, text))
    embedded = llama.get_input_embeddings()(text)
    for (logits, scores), (known,) in zip(seen, places, strict=True):
        expected = Reference(tensors_of()).drafts(embedded.detach(), [part.detach() for part in parts], known, 1)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        assert scores.item() == pytest.approx(expected.softmax(-1).max().item(), rel=1e-3), "its probability is its score"


def last_states(model, text: torch.Tensor) -> torch.Tensor:
    """Those after the last layer, before the final norm."""
    kept: list = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, given, found: kept.append(found))
    model(text[None])
    hook.remove()
    return (kept[0][0] if isinstance(kept[0], tuple) else kept[0]).view(len(text), -1)


def test_mode_fast_leaves_with_the_heads_own_tokens(good):
    model, head = good
    with TIDE(model, head, TIDEConfig(mode="fast", exit_threshold=0.5)) as engine:
        found = engine.generate(torch.tensor([[1]]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(found, engine.generate(torch.tensor([[1]]), max_new_tokens=12, do_sample=False, pad_token_id=0))
        assert engine.last_stats.exit_rate > 0
