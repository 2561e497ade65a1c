"""What can only be seen on a GPU: compiled kernels, their bits, graphs. Skipped where there is none.

PYTHONPATH=src:tests python -m pytest -o addopts="" tests/gpu
"""

from __future__ import annotations

import pytest
import torch

import TIDE
from decoding import rows_of
from families import build
from layers import COLUMNS, DIM, FEATURES, KV_HEADS, ROWS, a_layer, a_pass, in_dtype
from TIDE.config import TIDEConfig
from TIDE.engine.host.segments import Segments
from TIDE.engine.select import checked
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.triton.tiles import card_of, overlaps
from TIDE.routing.exits import Exit
from TIDE.routing.heads import build_head, head_sizes
from TIDE.routing.policies import policy_for
from TIDE.routing.router import SIGNALS, Router
from TIDE.routing.router_file import RouterFile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest
DTYPES = list(CLOSE)
FUSED = ["llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "gemma", "gemma2", "gemma3", "granite", "smollm3"]
FUSED += ["olmo", "olmo2", "olmo3", "stablelm", "starcoder2"]
CAPTURED = ["gpt2", "gpt_neox", "opt", "cohere", "glm4", "llama4"]
NOT_CAPTURED = ["bloom", "falcon", "gptj", "mpt"]  # they copy from the host in their forward, or have tables of one size
OPTIONS = dict(max_new_tokens=40, do_sample=False, eos_token_id=None)


@pytest.fixture
def ops():
    return pytest.importorskip("TIDE.kernels.triton.ops")


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0)).cuda()


def with_exit(model, depth, strategy="memory", threshold=0.0, vocabulary=None):
    """A policy with one random exit."""
    torch.manual_seed(0)
    config = model.config.get_text_config(decoder=True)
    head = build_head(strategy, head_sizes(strategy, config, config.hidden_size, depth)).eval().requires_grad_(False)
    router = Router(config.hidden_size, 8, SIGNALS).requires_grad_(False)
    file = RouterFile(strategy, {depth: Exit(head, router, threshold)}, (depth,), 7, vocabulary)
    with TIDE.TIDE(model) as engine:
        return policy_for(file, engine.adapter)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_the_layer_is_the_references(features, dtype, ops):
    generator = torch.Generator().manual_seed(3)
    layer, tokens = a_layer(generator, **features), a_pass(generator, {2: 4, 0: 1}, 9)
    cache = torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator)
    ours, own = in_dtype(tokens, dtype, "cuda"), cache.to("cuda", dtype)
    ops.decoder_layer(in_dtype(layer, dtype, "cuda"), ours, own[0], own[1])
    reference.decoder_layer(layer, tokens, cache[0], cache[1])
    for found, expected in ((ours.x, tokens.x), (own, cache)):
        allowed = CLOSE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("features", [dict(), dict(out_norms=True, in_norms=False, head_norms="all")], ids=str)
def test_kernels_that_begin_early_have_the_bits_of_kernels_that_do_not(features, ops, monkeypatch):
    """A graph of eight layers is replayed with inputs in turn: what is read too early is of another input."""
    if not overlaps(card_of(torch.device("cuda"))):
        pytest.skip("the card launches one kernel after the other")
    generator, dtype = torch.Generator().manual_seed(3), torch.bfloat16
    layers = [in_dtype(a_layer(generator, **features), dtype, "cuda") for _ in range(8)]
    tokens = in_dtype(a_pass(generator, {2: 4, 0: 1}, 9), dtype, "cuda")
    cache = torch.randn(2, len(layers), ROWS, KV_HEADS, COLUMNS, DIM, generator=generator).to("cuda", dtype)
    inputs = torch.randn(4, *tokens.x.shape, generator=generator).to("cuda", dtype)
    given = inputs[0].clone()

    def run():
        tokens.x.copy_(given)
        for layer, keys, values in zip(layers, *cache, strict=True):
            ops.decoder_layer(layer, tokens, keys, values)
        return tokens.x.clone()

    expected = []
    with monkeypatch.context() as patched:
        patched.setattr("TIDE.kernels.triton.launch.overlaps", lambda card: False)
        for own in inputs:
            given.copy_(own)
            expected.append(run())
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for number in range(200):
        given.copy_(inputs[number % 4])
        graph.replay()
        assert torch.equal(found, expected[number % 4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("together", range(2, 17))
def test_logits_have_the_same_bits_alone_and_among_others(dtype, together, ops):
    """Through all layers and the LM head of a model, as a deep pass computes them."""
    model = build("llama").to("cuda", dtype)
    ids = torch.randint(3, 100, (together + 9,), generator=torch.Generator().manual_seed(1))

    def logits(counts):
        (row,) = rows_of(ids[None], engine.adapter.num_layers)
        segments = Segments(engine.runner, engine.plan.spans, [row], len(ids))
        return torch.cat([segments.run(0, {row: n}, {row: segments.length(0, row)})[row] for n in counts])

    with TIDE.TIDE(model) as engine, torch.inference_mode():
        engine.runner = checked(engine.runner)
        assert engine.runner.name == "triton"
        alone, among = logits([9] + [1] * together), logits([9, together])
    assert torch.equal(alone, among)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_in_fp32_the_text_is_the_models(name, depth, ids):
    model = build(name).cuda()
    expected = model.generate(ids, **OPTIONS)
    with TIDE.TIDE(model, None if depth is None else with_exit(model, depth)) as engine:
        for _ in range(3):  # as it is written, captured, replayed
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert engine.runner.name == "triton"


@pytest.mark.parametrize("name", [*CAPTURED, *NOT_CAPTURED])
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_families_without_fused_layers_run_their_own(name, depth, ids):
    model = build(name).cuda()
    expected = model.generate(ids, **OPTIONS)
    with TIDE.TIDE(model, None if depth is None else with_exit(model, depth)) as engine:
        for _ in range(4):
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert engine.runner.name == "modules"
        assert (engine.without_graphs is None) == (name in CAPTURED)
        assert (engine.capture_seconds > 0) or name in NOT_CAPTURED


def test_generation_stops_at_the_context_limit(ids):
    """Rounds run ahead of what is known, past the positions that a model has."""
    model = build("gpt2").cuda()
    limit = model.config.max_position_embeddings
    text = torch.randint(3, 100, (1, limit - 20), generator=torch.Generator().manual_seed(5)).cuda()
    with TIDE.TIDE(model) as engine:
        for _ in range(3):
            assert engine.generate(text, max_new_tokens=40, do_sample=False, eos_token_id=None).shape[1] == limit
        assert engine.without_graphs is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("depth", [0, 2])
def test_in_half_precision_exact_is_exits_off(dtype, depth, ids):
    model = build("llama").to("cuda", dtype)
    with TIDE.TIDE(model, with_exit(model, depth)) as engine:
        for _ in range(3):
            exact = engine.generate(ids, **OPTIONS)
            drafted = engine.last_stats.drafted
            with engine.using(engine.config, exits=False):
                assert torch.equal(engine.generate(ids, **OPTIONS), exact)
        assert drafted


@pytest.mark.parametrize("switch", ["TIDE_NO_GRAPHS=1", "TIDE_NO_CUDA=1", "TIDE_BACKEND=modules"])
def test_plain_paths_write_the_same(switch, ids, monkeypatch):
    model = build("llama").cuda()
    expected = model.generate(ids, **OPTIONS)
    monkeypatch.setenv(*switch.split("="))
    with TIDE.TIDE(model, with_exit(model, 0)) as engine:
        for _ in range(2):
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert engine.capture_seconds == 0


@pytest.mark.parametrize(("strategy", "depth"), [("memory", 0), ("memory", 2), ("identity", 2), ("lens", 2)])
def test_mode_fast_in_rounds_is_mode_fast_without_kernels(strategy, depth, ids, monkeypatch):
    model, texts = build("llama").cuda(), []
    config = TIDEConfig(mode="fast", exit_threshold=0.0, max_pending=3, max_exit_share=0.7)
    policy = with_exit(model, depth, strategy)
    for backend in ("triton", "modules"):
        monkeypatch.setenv("TIDE_BACKEND", backend)
        with TIDE.TIDE(model, policy, config) as engine:
            texts.append([engine.generate(ids, **OPTIONS)[0].tolist() for _ in range(3)])
    assert texts[0][0] == texts[0][1] == texts[0][2] == texts[1][0]


@pytest.mark.parametrize("name", FUSED)
def test_kv_of_skipped_layers_are_those_the_model_would_make(name, ids, monkeypatch):
    model, texts = build(name).cuda(), []
    config = TIDEConfig(mode="fast", exit_threshold=0.0, kv_cache_strategy="propagate", max_exit_share=0.7)
    policy = with_exit(model, 2, "identity")
    both = torch.cat([ids, ids.flip(1)])
    for backend in ("triton", "modules"):
        monkeypatch.setenv("TIDE_BACKEND", backend)
        with TIDE.TIDE(model, policy, config) as engine:
            options = {**OPTIONS, "attention_mask": torch.ones_like(both), "pad_token_id": 0}
            texts.append([engine.generate(ids, **OPTIONS).tolist(), engine.generate(both, **options).tolist()])
            assert engine.runner.name == backend
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drafts_may_come_from_a_vocabulary_of_their_own(dtype, ids):
    model, own = build("llama").to("cuda", dtype), torch.arange(0, 96, 3)
    policy = with_exit(model, 0, vocabulary=own)
    with TIDE.TIDE(model) as engine:
        expected = engine.generate(ids, **OPTIONS)
    with TIDE.TIDE(model, policy) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert engine.last_stats.drafted and engine.capture_seconds
    with TIDE.TIDE(model, policy, TIDEConfig(mode="fast", exit_threshold=0.0, max_exit_share=0.7)) as engine:
        text = engine.generate(ids, **OPTIONS)[0, ids.shape[1] :].tolist()
        early = {token for token, decided in zip(text, engine.last_rows[0].decided, strict=True) if decided.depth == 0}
        assert early and early <= set(own.tolist())


@pytest.mark.parametrize("depth", [None, 0, 2])
def test_models_spread_over_devices_run_as_they_are(depth, ids):
    accelerate = pytest.importorskip("accelerate")
    whole = build("llama")
    expected = whole.generate(ids.cpu(), **OPTIONS)
    places = {f"model.layers.{layer}": "cpu" if layer > 1 else 0 for layer in range(4)}
    around = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    spread = accelerate.dispatch_model(build("llama"), {**places, **around})
    policy = None if depth is None else with_exit(spread, depth)
    with TIDE.TIDE(spread, policy) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS).cpu(), expected)
        assert engine.runner.name == "modules" and "several devices" in engine.backend


@pytest.mark.parametrize("depth", [None, 0])
def test_what_graphs_were_captured_with_may_change(depth, ids):
    """Adapters are switched, merged and unloaded, the LM head is exchanged; a graph would go on as before."""
    peft = pytest.importorskip("peft")
    model, texts = build("llama").cuda(), []
    policy = None if depth is None else with_exit(model, depth)
    torch.manual_seed(2)
    asked = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, asked).eval()
    with TIDE.TIDE(adapted, policy) as engine:

        def written():
            expected = model.generate(ids, **OPTIONS)
            assert all(torch.equal(engine.generate(ids, **OPTIONS), expected) for _ in range(3))
            assert engine.capture_seconds > 0
            texts.append(expected.tolist())

        written()
        for switch in (adapted.base_model.disable_adapter_layers, adapted.base_model.enable_adapter_layers):
            switch()
            written()
        adapted.merge_and_unload()
        written()
        assert engine.runner.name == "triton"
        model.lm_head = build("llama", vocab_size=model.config.vocab_size, hidden_size=64).cuda().lm_head
        with torch.no_grad():
            model.lm_head.weight.neg_()
        written()
    assert texts[0] == texts[2] == texts[3] and len({str(text) for text in texts}) == 3


def test_rows_side_by_side_and_sampling_go_through_fused_layers(ids):
    model = build("llama").cuda()
    both = torch.cat([ids, ids.flip(1)])
    options = {**OPTIONS, "attention_mask": torch.ones_like(both), "pad_token_id": 0}
    with TIDE.TIDE(model) as engine:
        engine.generate(ids, **OPTIONS)
        assert engine.runner.name == "triton" and engine.runner.is_checked
        assert torch.equal(engine.generate(both, **options), model.generate(both, **options))
        sampled = dict(max_new_tokens=20, do_sample=True, eos_token_id=None)
        found = engine.generate(ids, seed=1, **sampled)
    with TIDE.TIDE(build("llama")) as engine:  # the same weights, on a CPU
        assert torch.equal(engine.generate(ids.cpu(), seed=1, **sampled), found.cpu())


def test_tokens_of_a_stream_stay_on_the_host(ids):
    """A copy to the device would wait for the round that is already running there."""
    model = build("llama").cuda()

    class Streamer:
        def __init__(self):
            self.devices = []

        def put(self, value):
            self.devices.append(value.device.type)

        def end(self):
            pass

    streamer = Streamer()
    with TIDE.TIDE(model) as engine:
        engine.generate(ids, streamer=streamer, **OPTIONS)
        request = engine._prepare(dict(OPTIONS, input_ids=ids), None)
        assert request.column(engine.last_rows, ids.shape[1]).device.type == "cpu"
    assert set(streamer.devices) == {"cpu"}


def test_weights_that_are_exchanged_are_the_ones_that_count(ids):
    model = build("llama").cuda()
    with TIDE.TIDE(model) as engine:
        engine.generate(ids, **OPTIONS)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
