"""A benchmark: contenders on the same prompts, interleaved, with what they cost and what they wrote.

    warm up and choose    every contender once; of those with a setting to choose, the fastest one, in no more time than
                          its timed runs will take
    each group of rows    a run with a streamer, for the times of tokens; then timed rounds, A, B, A, B
    at the end            the first prompt alone, without and with hooks on the model's layers: did those run that were
                          reported, and does a timed run report the same?

A contender that fails is named with its reason, and the others go on; what it had measured stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from TIDE.bench.arrivals import Arrivals
from TIDE.bench.contenders import OURS, Contender, PromptBatch, Run, Unavailable, groups, make
from TIDE.bench.energy import EnergyMeter
from TIDE.bench.layer_count import counted_layers, impossible, timed_wrong, wrong_with
from TIDE.bench.measured import Layers, Measured, Results, Timed
from TIDE.bench.memory import forget_peak, peak_gib
from TIDE.disturbance import moment, since
from TIDE.engine.engine import TIDE
from TIDE.stats import ExitStats

COUNTED = 32  # new tokens of the run whose layers are counted
TRIED = 4, 24  # fewest and most new tokens of the runs that choose a setting
TRIES = 3  # runs of each setting, if there is time; the fastest counts


class Benchmark:
    """Contenders on the prompts of a user.

    Args:
        names: of contenders, see `contenders.py`; the first is the one that texts and speeds are compared with.
        rows: prompts that are continued together.
        rounds: timed runs of each contender for each group of rows.
        after_group: is called with what there is so far, to keep it.
        say: prints what is done before the timed runs.
    """

    def __init__(
        self,
        engine: TIDE,
        prompts: Sequence[list[int]],
        names: Sequence[str],
        *,
        max_new_tokens: int = 64,
        rows: int = 1,
        rounds: int = 3,
        after_group: Callable[[Results], None] = lambda results: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.engine, self.rounds, self._after_group, self._say = engine, rounds, after_group, say
        self.groups = groups(prompts, rows, max_new_tokens, engine.model)
        self.meter = EnergyMeter(engine.adapter.device)
        self._names, self._rows = list(dict.fromkeys(names)), rows
        layers = engine.adapter.num_layers
        self.results = Results(self._names[0], len(self.groups), rows, max_new_tokens, rounds, layers, self.meter.why_not)
        self._running: dict[str, Contender] = {}

    def run(self) -> Results:
        """Measure, and return what was measured. An interruption leaves it in `results`."""
        try:
            self._begin()
            with tqdm(total=len(self.groups) * len(self._running) * (self.rounds + 1), unit="run") as bar:
                for number, batch in enumerate(self.groups):
                    self._group(number, batch, bar)
                    self._after_group(self.results)
            self._count_layers()
        finally:
            for contender in self._running.values():
                contender.close()
        return self.results

    def _begin(self) -> None:
        for name in self._names:
            self._say(f"warming up: {name}")
            try:
                contender = make(name, self.engine, self._rows)
            except Exception as problem:  # of any library: the others go on
                self.results.absent[name] = _said(problem)
                continue
            self.results.measured[name] = Measured(name, contender.title)
            self._running[name] = contender
            self._try(name, partial(self._choose, contender))

    def _try(self, name: str, work: Callable[[], None]) -> None:
        """Do something for a contender; where it fails, the contender ends there and the others go on."""
        if name not in self._running:
            return
        try:
            work()
        except Exception as problem:
            self.results.absent[name] = _said(problem)
            self._running.pop(name).close()

    def _choose(self, contender: Contender) -> None:
        """Warm up a contender, and keep its fastest setting."""
        own, variants = self.results.measured[contender.name], contender.variants
        (setting, *others) = variants
        took = self._timed(variants[setting], self.groups[0]).seconds
        if others:
            own.tried = self._tried(variants, took)
            setting = min(own.tried, key=own.tried.__getitem__)
            untried = [words for words in variants if words not in own.tried]
            late = f"; no time for {', '.join(untried)}" if untried else ""
            self._say(f"{contender.name}: {setting}, the fastest of {', '.join(own.tried)}{late}")
        own.setting = setting
        self._running[contender.name] = replace(contender, variants={setting: variants[setting]})

    def _tried(self, variants: dict[str, Run], took: float) -> dict[str, float]:
        """Return the shortest time of each setting. At least one is tried, others for no longer than timed runs will take.

        Args:
            took: seconds of a run of the first group.
        """
        runs, seconds, spent, longest = len(self.groups) * self.rounds, dict[str, float](), 0.0, 0.0
        limit, (fewest, most) = took * runs, TRIED
        tokens = self.groups[0].max_new_tokens * runs // len(variants)
        short = self.groups[0].first_row(min(most, max(fewest, tokens)))
        for words, run in [*variants.items()] * TRIES:
            if seconds and spent + longest > limit:
                break
            took = self._timed(run, short).seconds
            spent, longest = spent + took, max(longest, took)
            seconds[words] = min(took, seconds.get(words, took))
        return seconds

    def _group(self, number: int, batch: PromptBatch, bar: tqdm[Any]) -> None:
        for name in list(self._running):
            bar.set_description(f"{name}, first token")
            self._try(name, partial(self._warm, name, batch, is_first=not number))
            bar.update()
        for turn in range(self.rounds):
            for name in sorted(self._running, reverse=bool(turn % 2)):
                bar.set_description(f"{name}, round {turn + 1}")
                self._try(name, partial(self._time, name, batch, number))
                bar.update()

    def _warm(self, name: str, batch: PromptBatch, is_first: bool) -> None:
        """Run a group untimed, then with a streamer."""
        (run,) = self._running[name].variants.values()
        if not is_first:  # the first group was run when settings were chosen
            run(batch, None)
        if self._running[name].streams:
            self._synchronize()
            arrivals = Arrivals()
            run(batch, arrivals)
            self.results.measured[name].saw(arrivals)

    def _time(self, name: str, batch: PromptBatch, number: int) -> None:
        (run,) = self._running[name].variants.values()
        timed = self._timed(run, batch)
        own = self.results.measured[name]
        own.add(number, timed, batch.texts(timed.ids), self.engine.last_stats if name in OURS else None)

    def _timed(self, run: Run, batch: PromptBatch) -> Timed:
        device = self.engine.adapter.device
        forget_peak(device)
        self._synchronize()
        before = moment()
        joules, began = self.meter.joules(), time.perf_counter()
        ids = run(batch, None)
        self._synchronize()
        seconds, after = time.perf_counter() - began, self.meter.joules()
        used = None if joules is None or after is None else after - joules
        return Timed(ids, seconds, used, peak_gib(device), since(before))

    def _synchronize(self) -> None:
        if self.engine.adapter.device.type == "cuda":
            torch.cuda.synchronize()

    def _count_layers(self) -> None:
        self._say("counting layers")
        batch = self.groups[0].first_row(COUNTED)
        for name in [name for name, own in self._running.items() if own.is_counted]:
            try:
                self._count(name, batch)
            except Exception as problem:  # TIDE_BACKEND may ask for compiled layers, which hooks rule out
                self.results.uncounted[name] = _said(problem)

    def _count(self, name: str, batch: PromptBatch) -> None:
        ((setting, run),) = self._running[name].variants.items()
        (timed_text,) = batch.texts(run(batch, None))
        timed = self.engine.last_stats
        with counted_layers(self.engine.adapter.layers) as found:
            (text,) = batch.texts(run(batch, None))
        told: ExitStats | None = self.engine.last_stats if name in OURS else None
        layers, prompt_pass = self.engine.adapter.num_layers, self.engine.plan.prompt_pass
        drafting = self._running[name].draft_layers.get(setting, 0) if batch.max_new_tokens > 1 else 0
        of_prompt = batch.width * (layers + drafting)
        if told is not None and prompt_pass is not None:
            of_prompt -= told.settled_tokens * (layers - prompt_pass.depth)
        own = self.results.measured[name]
        wrong = None if told is None else wrong_with(found, told)
        if told is not None and own.stats is not None:
            wrong = wrong or impossible(own.stats, name)
            if timed_text == text:
                wrong = wrong or timed_wrong(timed, told, name, batch.width)
            else:
                self.results.uncounted[name] = "those of timed runs, whose text is not that of the model's own modules"
        own.layers = Layers(
            new_tokens=len(text),
            per_token=(found.pairs - of_prompt) / max(1, len(text) - 1),
            tokens_per_pass=len(text) / max(1, found.last_calls),
            of=layers,
            drafted=found.last_tokens - batch.width - (found.last_calls - 1),
            accepted=len(text) - found.last_calls,
            wrong=wrong,
        )


def _said(problem: Exception) -> str:
    words = " ".join(str(problem).split())[:300]
    return words if isinstance(problem, Unavailable) else f"{type(problem).__name__}: {words}"
