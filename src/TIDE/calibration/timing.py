"""Timing: the cost of a pass through layers, an exit head and a sampled token on this machine.

One table is enough for every span of layers:

    time(start → stop, n tokens) = entry + (stop − start) · layer(n) + LM head(n), the last at full depth only

On a CPU that is time by the clock. On a GPU rounds are launched as a whole and do not wait for Python, so it is the time that
the device works; by the clock a layer would seem as dear as an LM head, and exits deep in the model as cheap as early ones.

Timings of a model on a machine are stored in the cache folder, so that calibrating twice gives the same file.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.self_texts import context_length
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.segments import Segments
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.models.default import cache_folder
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.policy import Candidates
from TIDE.routing.storage import write_atomically

logger = logging.getLogger(__name__)

COUNTS = (1, 2, 4, 8, 16)
CONTEXT = 128  # tokens before the timed ones, if the model takes as many
REPEATS = 9


@dataclass(frozen=True)
class Costs:
    """The costs of the parts of a step, in seconds."""

    entry: float  # a pass through no layer
    layer: dict[int, float]  # one layer, by number of tokens
    lm_head: dict[int, float]  # by number of tokens
    choice: float  # a token sampled from logits
    num_layers: int

    def span(self, start: int, stop: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return the time of a pass of (n,) tokens through the layers [start, stop)."""
        found = self.entry + (stop - start) * _between(self.layer, tokens)
        return found + _between(self.lm_head, tokens) if stop == self.num_layers else found

    @property
    def full_step(self) -> float:
        """Seconds for one token without exits."""
        return float(self.span(0, self.num_layers, torch.ones(1))) + self.choice

    def milliseconds(self) -> dict[str, Any]:
        """Return the costs in milliseconds, rounded for display."""
        return {
            "full step": round(self.full_step * 1e3, 3),
            "entry": round(self.entry * 1e3, 3),
            "layer by tokens": {n: round(value * 1e3, 4) for n, value in self.layer.items()},
            "LM head by tokens": {n: round(value * 1e3, 4) for n, value in self.lm_head.items()},
        }


def measure_costs(adapter: ModelAdapter, key: str) -> Costs:
    """Time the model's layers, or return earlier timings of this model and machine."""
    found = kept(key)
    if found is not None:
        by_count = {name: {int(n): value for n, value in found[name].items()} for name in ("layer", "lm_head")}
        return Costs(found["entry"], by_count["layer"], by_count["lm_head"], found["choice"], found["num_layers"])
    with adapter.grad_off():
        entry, full = _passes(adapter)
        lm_head = {n: timed(adapter, lambda n=n: adapter.head(_states(adapter, n))) for n in COUNTS}  # type: ignore[misc]
        layer = {n: max(full[n] - entry - lm_head[n], 1e-7) / adapter.num_layers for n in COUNTS}
        costs = Costs(entry, layer, lm_head, _choice(adapter), adapter.num_layers)
    keep(key, asdict(costs))
    return costs


def measure_head(adapter: ModelAdapter, policy: CalibratedPolicy, depth: int, key: str) -> float:
    """Return the seconds to score and predict one token at an exit."""
    found = kept(key)
    if found is not None:
        return float(found["seconds"])
    with adapter.grad_off():
        request = policy.start(1, adapter.head)
        states = _states(adapter, CONTEXT + 1)
        for watched in policy.watches:
            shown = states if watched < adapter.num_layers else states[:CONTEXT]
            request.observe(watched, 0, 0, shown)
        candidates = Candidates(depth, states[:1], [0], [CONTEXT])

        def exit_once() -> None:
            request.score(candidates).tolist()
            request.predict(candidates, adapter.head)

        seconds = timed(adapter, exit_once)
    keep(key, {"seconds": seconds})
    return seconds


def timed(adapter: ModelAdapter, action: Callable[[], object]) -> float:
    """Return the seconds of an action, after a warm-up: on a GPU those in which it works, otherwise the least by the clock,
    because noise only slows it down."""
    for _ in range(2):
        action()
    if adapter.device.type == "cuda" and (busy := _busy(action)):
        return busy
    return min(_by_the_clock(adapter.device, action) for _ in range(REPEATS))


def _by_the_clock(device: torch.device, action: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


def _busy(action: Callable[[], object]) -> float:
    """Return the seconds that a GPU works for an action; 0: its profiler does not say."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(REPEATS):
                action()
            torch.cuda.synchronize()
    except RuntimeError as problem:  # another profiler may be at work
        _say_without(str(problem))
        return 0.0
    found = work_of(seen.events() or ()) / REPEATS
    if not found:
        _say_without("its profiler saw none")
    return found


@functools.cache
def _say_without(reason: str) -> None:
    """Say, once, that Python's time is in what is timed on a GPU."""
    logger.warning("the GPU's work cannot be timed, so time by the clock is taken: %s.", reason)


def work_of(events: Iterable[Any]) -> float:
    """Return the seconds of work on a GPU among a profiler's events."""
    return sum(event.device_time for event in events if event.device_type == DeviceType.CUDA) / 1e6


def machine(adapter: ModelAdapter) -> str:
    """Return the device, dtype and torch version that timings depend on, as a key."""
    device = adapter.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"
    return f"{name}|{str(adapter.model.dtype).removeprefix('torch.')}|torch-{torch.__version__}"


def _passes(adapter: ModelAdapter) -> tuple[float, dict[int, float]]:
    """Return the time of a pass of one token through no layer, and of passes through all layers by number of tokens."""
    layers, before = adapter.num_layers, max(1, min(CONTEXT, context_length(adapter.model) - max(COUNTS)))
    row = Row([i % 97 + 1 for i in range(before + max(COUNTS))], StopRule(), layers)
    segments = Segments(ModuleRunner(adapter), (range(0), range(layers)), [row], row.size)
    for segment in (0, 1):
        segments.run(segment, {row: before})

    def enter(count: int) -> None:
        segments.rollback(row, before)
        segments.run(0, {row: count})

    def through(count: int) -> None:
        enter(count)
        segments.run(1, {row: count}, {row: before})

    entry = timed(adapter, lambda: enter(1))
    counts = tqdm(COUNTS, desc="timing passes of 1 to 16 tokens", unit="pass")
    return entry, {n: timed(adapter, lambda n=n: through(n)) - entry for n in counts}  # type: ignore[misc]


def _choice(adapter: ModelAdapter) -> float:
    row = Row([1] * 4, StopRule(), adapter.num_layers)
    sampler = Sampler([row], adapter.device)
    logits = adapter.head(_states(adapter, 1))
    return timed(adapter, lambda: sampler.sample([row], logits, 0))


def _states(adapter: ModelAdapter, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(count, adapter.hidden_dim, generator=generator)
    return states.to(adapter.device, adapter.model.dtype)


def _between(table: dict[int, float], tokens: torch.Tensor) -> torch.Tensor:
    """Interpolate linearly between the measured token counts, and extrapolate beyond them."""
    counts = torch.tensor(sorted(table), dtype=torch.float)
    values = torch.tensor([table[int(n)] for n in counts])
    at = torch.searchsorted(counts, tokens.float(), right=True).clamp(1, len(counts) - 1)
    share = (tokens - counts[at - 1]) / (counts[at] - counts[at - 1])
    return values[at - 1] + share * (values[at] - values[at - 1])


def _timings_file() -> Path:
    return cache_folder() / "timings.json"


def kept(key: str) -> dict[str, Any] | None:
    """Return what was stored for a model and machine; None: nothing."""
    return _all_kept().get(key)


def keep(key: str, values: dict[str, Any]) -> None:
    write_atomically(_timings_file(), json.dumps({**_all_kept(), key: values}, indent=1).encode())


def _all_kept() -> dict[str, dict[str, Any]]:
    try:
        return json.loads(_timings_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
