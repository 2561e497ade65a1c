"""Decoding speed at batch 1: `model.generate` and TIDE, interleaved in one run.

    python benchmarks/bench_decode.py                     the embedded default model
    python benchmarks/bench_decode.py --model llama-8b    a random Llama of that size in bf16, for a GPU
    python benchmarks/bench_decode.py --model gemma3-300m a random Gemma 3 of that size
    python benchmarks/bench_decode.py --model tiny        a random tiny Llama, as a smoke test

On a GPU `model.generate` also runs with a static cache, compiled, and speeds stand beside what the memory allows: the bytes of
all weights but the embedding, at the bandwidth of a copy. Two more comparisons with exits off: exits that never agree, and the
pattern "three of four tokens leave at a quarter of the depth, the fourth carries them" (mode fast, wrong text).

Prints a table, then one JSON line. Speeds are medians over the rounds, with the prompt; "decoding" is without it (one new
token's time taken off).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import TIDE
from TIDE.config import TIDEConfig
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.routing.exits import Exit
from TIDE.routing.heads import build_head, head_sizes
from TIDE.routing.policies import policy_for
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router import SIGNALS, Router
from TIDE.routing.router_file import RouterFile

SHAPES = {
    "tiny": dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4),
    "smollm2-135m": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "qwen2-0.5b": dict(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "qwen2-1.5b": dict(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "llama-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ),
    "gemma3-300m": dict(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        query_pre_attn_scalar=256,
        max_position_embeddings=8192,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help=f"{', '.join(SHAPES)}, or what TIDE.load_model takes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    dtype = args.dtype and getattr(torch, args.dtype)
    model = random_model(args.model) if args.model in SHAPES else TIDE.load_model(args.model, dtype=dtype).model
    torch.manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, args.prompt_tokens), device=model.device)
    model.generation_config.eos_token_id = None  # all texts have the same length
    facts = first_calls(model, ids)
    with TIDE.TIDE(model) as engine:
        runs = {
            "model.generate": lambda new: model.generate(ids, max_new_tokens=new, do_sample=False),
            "TIDE, exits off": lambda new: engine.generate(ids, max_new_tokens=new, do_sample=False, cache_salt=new_salt()),
        }
        if on_gpu():
            static = dict(do_sample=False, cache_implementation="static")
            runs["compiled"] = lambda new: model.generate(ids, max_new_tokens=new, **static)
        for new in (args.new_tokens, args.new_tokens, 1):  # compile, capture, warm up
            measure(runs, rounds=1, new_tokens=new)
        first, _ = measure(runs, args.rounds, 1)
        seconds, texts = measure(runs, args.rounds, args.new_tokens)
    forced = {"never right": never_right(model, ids, args), "three of four leave": three_of_four(model, ids, args)}
    same = len({texts[name] for name in ("model.generate", "TIDE, exits off")}) == 1
    report(args, model, first, seconds, same, facts | forced)


def never_right(model: transformers.PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> float:
    """Decoding speed with an untrained memory head before the first layer, by that with exits off."""
    return against_exits_off(model, ids, args, "memory", 0, TIDEConfig())


def three_of_four(model: transformers.PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> float:
    config = TIDEConfig(mode="fast", exit_threshold=0.0, max_pending=3, max_exit_share=1.0)
    return against_exits_off(model, ids, args, "identity", model.config.num_hidden_layers // 4, config)


def untrained(
    model: transformers.PreTrainedModel, strategy: str, depth: int, vocabulary: torch.Tensor | None = None
) -> ExitPolicy:
    """Return the policy of an untrained exit, whose drafts are of the tokens in `vocabulary`; None: of all."""
    sizes = head_sizes(strategy, model.config, model.config.hidden_size, depth)
    exit_ = Exit(build_head(strategy, sizes).eval(), Router(sizes.hidden_dim, 128, SIGNALS), 0.5)
    with TIDE.TIDE(model) as engine:
        return policy_for(RouterFile(strategy, {depth: exit_}, (depth,), 7, vocabulary), engine.adapter)


def against_exits_off(
    model: transformers.PreTrainedModel,
    ids: torch.Tensor,
    args: argparse.Namespace,
    strategy: str,
    depth: int,
    config: TIDEConfig,
) -> float:
    with TIDE.TIDE(model, untrained(model, strategy, depth), config) as engine:

        def run(new: int, exits: bool) -> torch.Tensor:
            with engine.using(config, exits=exits):
                return engine.generate(ids, max_new_tokens=new, do_sample=False, cache_salt=new_salt())

        runs = {"off": lambda new: run(new, False), "on": lambda new: run(new, True)}
        measure(runs, 2, args.new_tokens)
        first, _ = measure(runs, args.rounds, 1)
        seconds, _ = measure(runs, args.rounds, args.new_tokens)
    own = {name: statistics.median(seconds[name]) - statistics.median(first[name]) for name in runs}
    return own["off"] / own["on"]


def on_gpu() -> bool:
    return torch.cuda.is_available()


def random_model(name: str, **sizes: int) -> transformers.PreTrainedModel:
    """A model of a shape with random weights, made where it will run; `sizes` take the place of the shape's."""
    torch.manual_seed(0)
    place = torch.device("cuda" if on_gpu() else "cpu")
    torch.set_default_dtype(torch.bfloat16 if on_gpu() else torch.float32)
    with place:
        family = next((own for own in ("Gemma3", "Qwen2") if name.startswith(own.lower())), "Llama")
        config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
        ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
        model = getattr(transformers, f"{family}ForCausalLM")(config(**{**SHAPES[name], **sizes}, **ids))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    found = run()
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def first_calls(model: transformers.PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Seconds up to the first token of the first call, the engine's making included; then what an engine adds to memory."""
    eager, _ = timed(lambda: model.generate(ids, max_new_tokens=1, do_sample=False))
    before = torch.cuda.memory_reserved() if on_gpu() else 0
    began = time.perf_counter()
    with TIDE.TIDE(model) as engine:
        next(iter(engine.stream(ids, max_new_tokens=2, do_sample=False)))
        found = {"first_token_eager": eager, "first_token_tide": time.perf_counter() - began}
        found["first_text_tide"], _ = timed(lambda: engine.generate(ids, max_new_tokens=64, do_sample=False))
        if on_gpu():
            found["gib_above_model"] = (torch.cuda.memory_reserved() - before) / 2**30
            found["capture_seconds"] = engine.capture_seconds
    return found


def measure(
    runs: dict[str, Callable[[int], torch.Tensor]], rounds: int, new_tokens: int
) -> tuple[dict[str, list[float]], dict[str, tuple[int, ...]]]:
    """Seconds of every run, the order turned round each time, and the text that each wrote last."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts = {}
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            took, ids = timed(lambda name=name: runs[name](new_tokens))
            seconds[name].append(took)
            texts[name] = tuple(ids[0].tolist())
    return seconds, texts


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [timed(lambda: [target.copy_(source) for _ in range(10)][-1])[0] for _ in range(4)]
    return 20 * source.numel() / min(times)


def allowed(model: transformers.PreTrainedModel) -> float:
    """Tokens per second if a step took as long as its weights take to be read."""
    return copy_bandwidth() / step_bytes(model)


def step_bytes(model: transformers.PreTrainedModel) -> int:
    """Bytes of the weights that a step reads: all but an embedding that is not the LM head too."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters()) - (0 if tied else table.numel() * table.element_size())


def report(
    args: argparse.Namespace,
    model: transformers.PreTrainedModel,
    first: dict[str, list[float]],
    seconds: dict[str, list[float]],
    same_text: bool,
    facts: dict[str, float],
) -> None:
    plain, limit = seconds["model.generate"], allowed(model) if on_gpu() else None
    print(f"{'':18}{'tok/s':>8}{'lowest':>9}{'highest':>9}{'ratio':>8}{'decoding':>10}" + f"{'of limit':>10}" * bool(limit))
    rows = {}
    for name, own in seconds.items():
        speeds = [args.new_tokens / second for second in own]
        ratio = statistics.median(base / second for base, second in zip(plain, own, strict=True))
        decoding = (args.new_tokens - 1) / max(1e-9, statistics.median(own) - statistics.median(first[name]))
        rows[name] = dict(
            tok_s=statistics.median(speeds), lowest=min(speeds), highest=max(speeds), ratio=ratio, decoding=decoding
        )
        line = f"{name:18}{rows[name]['tok_s']:8.1f}{min(speeds):9.1f}{max(speeds):9.1f}{ratio:8.3f}{decoding:10.1f}"
        if limit:
            rows[name]["of_limit"] = decoding / limit
            line += f"{decoding / limit:10.3f}"
        print(line)
    print(f"same text: {'yes' if same_text else 'NO'}; " + ", ".join(f"{name} {value:.3f}" for name, value in facts.items()))
    where = torch.cuda.get_device_name() if on_gpu() else f"{platform.machine()}, {torch.get_num_threads()} threads"
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    facts = dict(vars(args), device=where, dtype=str(model.dtype), **versions, **facts, limit=limit)
    print(json.dumps(dict(facts, same_text=same_text, results=rows)))


if __name__ == "__main__":
    main()
