"""Tuning: speed and agreement of each setting of an engine on the user's prompts.

    exits off     every token runs all layers: the baseline, and the full model's text
    exact         drafts are verified: the same text
    fast          for every kv_cache_strategy and exit threshold: faster, with a text that may differ

Settings are interleaved: every prompt is continued with all of them before the next one, starting with another setting each
time, so that a machine that slows down affects all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from TIDE.adapters.probe import Store
from TIDE.calibration.losses import mismatch, rouge_l
from TIDE.calibration.prompts import Prompts, check_max_new_tokens, continued, prompt_ids
from TIDE.config import KV_CACHE_STRATEGIES, TIDEConfig
from TIDE.disturbance import Load, moment, notice, since
from TIDE.engine.engine import TIDE
from TIDE.routing.fingerprint import fingerprint

THRESHOLDS = (0.95, 0.9, 0.8, 0.6, 0.4)
WARM_UP = 8  # tokens generated with each setting before timing begins


@dataclass(frozen=True)
class Tried:
    """A setting and its measured speed and agreement.

    Attributes:
        mode: "off", "exact" or "fast".
        exit_threshold: of mode "fast".
        tokens_per_second: new tokens over all seconds, prompts included.
        speedup: over exits off.
        agreement: share of positions at which the token is the full model's.
        rouge_l: F of the longest common subsequence with the full model's text.
        exit_rate: share of new tokens decided at an exit.
    """

    mode: str
    kv_cache_strategy: str
    exit_threshold: float | None
    tokens_per_second: float
    speedup: float
    agreement: float
    rouge_l: float
    exit_rate: float


@dataclass(frozen=True)
class Tuning:
    """The results of all settings on the same prompts: exits off, then exact, then fast."""

    model: str
    prompts: int
    new_tokens: int
    rows: list[Tried]
    disturbed: tuple[str, ...] = ()  # lines on other programs that ran meanwhile

    def table(self) -> str:
        """Return the results as a table for the terminal."""
        cells = [["mode", "kv cache", "threshold", "tok/s", "x off", "agreement", "ROUGE-L", "exits"]]
        for row in self.rows:
            threshold = "-" if row.exit_threshold is None else f"{row.exit_threshold:g}"
            cells.append([row.mode, row.kv_cache_strategy, threshold, f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}"])
            cells[-1] += [f"{row.agreement:.1%}", f"{row.rouge_l:.3f}", f"{row.exit_rate:.1%}"]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        head = f"{self.model}: {self.prompts} prompts, up to {self.new_tokens} new tokens, one at a time, greedily"
        return "\n".join([head, "", *lines, *self.disturbed])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tune(
    engine: TIDE,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    tokenizer: PreTrainedTokenizerBase | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    strategies: Sequence[str] | None = None,
) -> Tuning:
    """Measure speed and agreement of exits off, mode "exact" and mode "fast" on your prompts.

    Args:
        prompts: token ids, or strings with `tokenizer`, which go into its chat template if it has one.
        max_new_tokens: most new tokens for each prompt.
        thresholds: exit thresholds of mode "fast".
        strategies: values of kv_cache_strategy in mode "fast"; None: all that the model supports.
    """
    check_max_new_tokens(max_new_tokens)
    if engine.policy is None:
        raise ValueError(
            "this engine has no exits to tune. Make it with a router file: TIDE.TIDE(model, 'router.safetensors')."
        )
    asked = prompt_ids(prompts, tokenizer)
    if not asked:
        raise ValueError("there are no prompts to measure on. Give at least one.")
    settings = _settings(engine, thresholds, _possible(engine) if strategies is None else strategies)
    for setting in settings:
        _written(engine, setting, asked[0], min(WARM_UP, max_new_tokens))
    sums = [_Sum() for _ in settings]
    for turn, prompt in enumerate(tqdm(asked, desc=f"{len(settings)} settings", unit="prompt")):
        order = [(turn + place) % len(settings) for place in range(len(settings))]
        written = {place: _written(engine, settings[place], prompt, max_new_tokens) for place in order}
        for place, own in enumerate(sums):
            own.add(written[place], written[0].ids)
    baseline = sums[0].speed
    rows = [own.row(setting, baseline) for own, setting in zip(sums, settings, strict=True)]
    name = fingerprint(engine.model).name or type(engine.model).__name__
    loads = {setting.words: own.loads for own, setting in zip(sums, settings, strict=True)}
    return Tuning(name, len(asked), max_new_tokens, rows, tuple(notice(loads)))


class _Setting(NamedTuple):
    config: TIDEConfig
    exits: bool = True

    @property
    def words(self) -> str:
        if not self.exits or self.config.effective_mode == "exact":
            return "exact" if self.exits else "exits off"
        return f"fast, {self.config.kv_cache_strategy}, {self.config.exit_threshold:g}"


class _Written(NamedTuple):
    ids: list[int]
    seconds: float
    exited: int
    load: Load


class _Sum:
    """The sums of a setting over prompts."""

    def __init__(self) -> None:
        self.tokens = self.exited = self.prompts = 0
        self.seconds = self.mismatch = self.rouge_l = 0.0
        self.loads: list[Load] = []

    def add(self, written: _Written, full: list[int]) -> None:
        self.prompts += 1
        self.tokens += len(written.ids)
        self.exited += written.exited
        self.seconds += written.seconds
        self.loads.append(written.load)
        self.mismatch += mismatch(written.ids, full)
        self.rouge_l += rouge_l(written.ids, full)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def row(self, setting: _Setting, baseline: float) -> Tried:
        config, exits = setting
        return Tried(
            mode=config.effective_mode if exits else "off",
            kv_cache_strategy=config.kv_cache_strategy if exits else "-",
            exit_threshold=config.exit_threshold,
            tokens_per_second=self.speed,
            speedup=self.speed / baseline,
            agreement=1 - self.mismatch / self.prompts,
            rouge_l=1 - self.rouge_l / self.prompts,
            exit_rate=self.exited / self.tokens,
        )


def _settings(engine: TIDE, thresholds: Sequence[float], strategies: Sequence[str]) -> list[_Setting]:
    exact = replace(engine.config.in_mode_exact(), exit_threshold=None)
    fast = [
        replace(engine.config, mode="fast", exit_threshold=threshold, kv_cache_strategy=strategy)
        for strategy in strategies
        for threshold in thresholds
    ]
    return [_Setting(exact, exits=False), _Setting(exact), *map(_Setting, fast)]


def _possible(engine: TIDE) -> Sequence[str]:
    """Return the strategies the model supports: running states cannot be filled in."""
    return ("exact",) if Store.STATE in engine.adapter.stores else KV_CACHE_STRATEGIES


def _written(engine: TIDE, setting: _Setting, prompt: list[int], max_new_tokens: int) -> _Written:
    with engine.using(*setting):
        before, began = moment(), time.perf_counter()
        (ids,) = continued(engine, [prompt], max_new_tokens)
        return _Written(ids, time.perf_counter() - began, engine.last_stats.exited_tokens, since(before))
