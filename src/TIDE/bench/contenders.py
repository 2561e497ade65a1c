"""Contenders: the ways to continue prompts that are compared on one model.

    generate     model.generate, eager                     off      TIDE, exits off
    compiled     model.generate, static cache, compiled    exact    TIDE, mode exact
    early-exit   model.generate(assistant_early_exit=…)    fast     TIDE, mode fast
    lookup       model.generate(prompt_lookup_num_tokens=…)
    continuous   transformers' continuous batching

Some have a number that their speed hangs on, such as the layer of an early exit: all of a short list are tried before anything
is timed, and the fastest one is the contender.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from TIDE.bench.layer_count import counted_layers
from TIDE.config import TIDEConfig
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.engine.engine import TIDE


@dataclass(frozen=True)
class PromptBatch:
    """Rows of prompts, continued together and greedily.

    Attributes:
        prompts: token ids of each row.
        ends: tokens that end a text.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    device: torch.device
    ends: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate`: left-padded ids and their mask."""
        gaps = [self.width - len(prompt) for prompt in self.prompts]
        ids = [[0] * gap + prompt for gap, prompt in zip(gaps, self.prompts, strict=True)]
        mask = [[0] * gap + [1] * (self.width - gap) for gap in gaps]
        tensors = {"input_ids": ids, "attention_mask": mask}
        given = {name: torch.tensor(values, device=self.device) for name, values in tensors.items()}
        return given | {"max_new_tokens": self.max_new_tokens, "do_sample": False, "pad_token_id": 0}

    def texts(self, ids: torch.Tensor) -> list[list[int]]:
        """Return the new tokens of each row, without the padding after its end."""
        rows = ids[:, self.width :].tolist()
        last = [next((index for index, token in enumerate(row) if token in self.ends), len(row) - 1) for row in rows]
        return [row[: index + 1] for row, index in zip(rows, last, strict=True)]

    def first_row(self, max_new_tokens: int) -> PromptBatch:
        """Return the first prompt alone."""
        return replace(self, prompts=self.prompts[:1], max_new_tokens=min(max_new_tokens, self.max_new_tokens))


def groups(prompts: Sequence[list[int]], rows: int, max_new_tokens: int, model: Any) -> list[PromptBatch]:
    """Return prompts in groups of `rows`; the last one is filled up from the beginning."""
    batches = [[prompts[(start + row) % len(prompts)] for row in range(rows)] for start in range(0, len(prompts), rows)]
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    return [PromptBatch(group, max_new_tokens, model.device, ends) for group in batches]


Run = Callable[[PromptBatch, BaseStreamer | None], torch.Tensor]  # prompts and continuations, as `model.generate` returns them
NAMES = ("generate", "compiled", "early-exit", "lookup", "continuous", "off", "exact", "fast")
OURS = ("off", "exact", "fast")
LOOKUPS = (2, 5, 10)  # tokens that prompt lookup copies at once
PATIENCE = 120  # seconds to wait for an answer of continuous batching


class Unavailable(RuntimeError):
    """A contender that cannot run here, and why."""


@dataclass(frozen=True)
class Contender:
    """A way to continue prompts.

    Attributes:
        variants: the settings that may be tried, in words -> the run; one: there is nothing to try.
        streams: its tokens can be seen arriving.
        is_counted: it runs the layers of the engine's model, one by one, so that hooks can count them.
        draft_layers: setting -> layers in which drafts run the prompt once more, on a cache of their own.
        close: lets go what it holds.
    """

    name: str
    title: str
    variants: dict[str, Run]
    streams: bool = True
    is_counted: bool = True
    draft_layers: Mapping[str, int] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None


def make(name: str, engine: TIDE, rows: int) -> Contender:
    """Return a contender; raise `Unavailable` where there is no such thing for this model, machine or number of rows."""
    if name in OURS:
        return _ours(name, engine)
    if name == "generate":
        return Contender(name, "model.generate", {"": _generate(engine)})
    if name == "compiled":
        return Contender(name, "compiled, static cache", {"": _generate(engine, **_compiled(engine))}, is_counted=False)
    if name == "continuous":
        return _continuous(engine)
    if rows > 1:
        raise Unavailable(f"transformers drafts for one row at a time, found {rows} rows")
    if name == "lookup":
        return Contender(name, "prompt lookup", {f"{n} tokens": _generate(engine, prompt_lookup_num_tokens=n) for n in LOOKUPS})
    assert name == "early-exit", name
    return _early_exit(engine)


def exit_layers(layers: int) -> list[int]:
    """Return the layers that are tried: eighths of the depth, up to three quarters."""
    return sorted({max(1, round(layers * eighths / 8)) for eighths in (1, 2, 3, 4, 6)} - {layers})


def _generate(engine: TIDE, **more: Any) -> Run:
    def run(batch: PromptBatch, streamer: BaseStreamer | None) -> torch.Tensor:
        found: torch.Tensor = engine.model.generate(**batch.options, **more, streamer=streamer)
        return found

    return run


def _early_exit(engine: TIDE) -> Contender:
    if engine.adapter.num_layers == 1:
        raise Unavailable("the model has one layer: there is nothing to exit from")
    with _held_layer_count(engine) as config, counted_layers(engine.adapter.layers) as found, torch.inference_mode():
        config.num_hidden_layers = 1
        engine.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=engine.model.device), use_cache=False)
    if found.last_calls:
        family = getattr(config, "model_type", type(config).__name__)
        raise Unavailable(
            f"transformers exits by config.num_hidden_layers, and {family} runs all of its layers whatever it says"
        )
    layers = {f"layer {n}": n for n in exit_layers(engine.adapter.num_layers)}
    variants = {words: _exiting(engine, n) for words, n in layers.items()}
    return Contender("early-exit", "assistant_early_exit", variants, draft_layers=layers)


def _exiting(engine: TIDE, layer: int) -> Run:
    generate = _generate(engine, assistant_early_exit=layer)

    def run(batch: PromptBatch, streamer: BaseStreamer | None) -> torch.Tensor:
        with _held_layer_count(engine):
            return generate(batch, streamer)

    return run


@contextmanager
def _held_layer_count(engine: TIDE) -> Iterator[Any]:
    """Yield the config whose layer count transformers lowers while it drafts, and leaves low if a draft fails."""
    config = getattr(engine.model, engine.model.base_model_prefix, engine.model).config
    count = config.num_hidden_layers
    try:
        yield config
    finally:
        config.num_hidden_layers = count


def _compiled(engine: TIDE) -> dict[str, Any]:
    how: dict[str, Any] = {"cache_implementation": "static"}
    if engine.model.device.type == "cpu":  # on a GPU transformers compiles without being told
        config = CompileConfig(fullgraph=False, mode="default")
        config._compile_all_devices = True
        how["compile_config"] = config
    return how


def _ours(name: str, engine: TIDE) -> Contender:
    if name != "off" and engine.policy is None:
        raise Unavailable("it needs exits, found none. Give --router FILE")
    config = replace(engine.config, mode="fast") if name == "fast" else engine.config.in_mode_exact()
    titles = {"off": "TIDE, exits off", "exact": "TIDE, exact", "fast": "TIDE, fast"}
    return Contender(name, titles[name], {"": _tide(engine, config, exits=name != "off")})


def _tide(engine: TIDE, config: TIDEConfig, exits: bool) -> Run:
    def run(batch: PromptBatch, streamer: BaseStreamer | None) -> torch.Tensor:
        with engine.using(config, exits):  # a salt of its own: the others have no prefix cache
            found = engine.generate(**batch.options, streamer=streamer, cache_salt=new_salt())
        assert isinstance(found, torch.Tensor)
        return found

    return run


def _continuous(engine: TIDE) -> Contender:
    """Continuous batching on a copy of the model, whose attention it changes. The others need memory too."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=False, eos_token_id=engine.model.generation_config.eos_token_id, pad_token_id=0)
    on_cpu = engine.model.device.type == "cpu"
    share: dict[str, Any] = dict(num_blocks=64, max_batch_tokens=2048) if on_cpu else dict(max_memory_percent=0.3)
    manager = copy.deepcopy(engine.model).init_continuous_batching(config, ContinuousBatchingConfig(**share))
    manager.start()

    def run(batch: PromptBatch, streamer: BaseStreamer | None) -> torch.Tensor:
        return _answered(manager, batch)

    return Contender("continuous", "continuous batching", {"": run}, streams=False, is_counted=False, close=manager.stop)


def _answered(manager: Any, batch: PromptBatch) -> torch.Tensor:
    order = [manager.add_request(prompt, max_new_tokens=batch.max_new_tokens) for prompt in batch.prompts]
    found: dict[str, list[int]] = {}
    while len(found) < len(order):
        output = manager.get_result(timeout=PATIENCE)
        if output is None:
            raise Unavailable(f"continuous batching gave no answer within {PATIENCE} s")
        if output.error is not None:
            raise Unavailable(f"continuous batching failed: {output.error}")
        if output.is_finished():
            found[output.request_id] = list(output.generated_tokens)
    ids = batch.options["input_ids"].tolist()
    texts = itertools.zip_longest(*(found[name] for name in order), fillvalue=0)
    columns = list(map(list, texts))
    return torch.tensor([row + [column[place] for column in columns] for place, row in enumerate(ids)])
