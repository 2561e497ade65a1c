"""Calibration: one call trains exits for a frozen model.

    texts → states → for each candidate checkpoint: head, draft vocabulary at the first, router → placement → router file
                   → exits in the prompt, if asked for                                                      ↗

A clock decides how many texts there are and how long heads are trained, so that all of it takes the minutes it was given.

Memory heads are tried from the shallowest candidate on, until one is not clearly faster than the best before it; heads of
other kinds are cheap to train, so all candidates are tried, and all heads of a file that is trained on from. The model is left
unchanged.
"""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.weights import unwrapped
from TIDE.calibration.clock import FEWEST, MOST, MOST_EPOCHS, Clock, room
from TIDE.calibration.collect import TRIAL_TOKENS, Budget, collect, collecting_seconds, extended, trial
from TIDE.calibration.fit import Exits, Fitted, Schedule, Split, agreement, fit_head, measure, step_seconds
from TIDE.calibration.fit_router import fit_router, fresh_router
from TIDE.calibration.placement import Candidate, Placed, best_setting, is_worth_going_deeper, place
from TIDE.calibration.self_texts import ANSWER, TYPICAL, answering_seconds, writing_seconds
from TIDE.calibration.start import Start
from TIDE.calibration.text import Text
from TIDE.calibration.texts import load_texts, unanswered
from TIDE.calibration.timing import machine, measure_costs, measure_head
from TIDE.calibration.vocabulary import CPU_LARGEST, Choice, choose_vocabulary, ranked, training_vocabulary
from TIDE.calibration.work import Work
from TIDE.config import TIDEConfig, with_short_names
from TIDE.engine.check import check_unknown
from TIDE.hub import check_dataset
from TIDE.prompt_exits import fit as prompt_exits
from TIDE.routing import storage
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.exits import EAGLE3, Exit
from TIDE.routing.fingerprint import Fingerprint, fingerprint
from TIDE.routing.heads import MEMORIES
from TIDE.routing.router_file import RouterFile
from TIDE.routing.storage import check_suffix

logger = logging.getLogger(__name__)
LENS_EPOCHS = 3  # times as many epochs: a lens learns slowly, and its steps are short
MEASURED = 400  # most held-out texts to measure on
TIMED_STEPS = 2  # of training, before it begins
GENTLY = 0.1  # of the learning rate, for heads that were trained before


@dataclass(frozen=True)
class Effort:
    """The amount of work of a calibration."""

    answer: int = ANSWER  # longest text the model writes, in tokens
    samples: int = MOST  # most texts
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def text_tokens(self) -> int:
        """Tokens of a text."""
        return TYPICAL + self.answer


FULL = Effort()
QUICK = Effort(64, 120, Schedule(epochs=4, batch_tokens=1024, positions=384, draft_steps=2, checks=2))
NO_TIME = "depth %d: not tried, as no time is left for another head"
COST_OF_8_BITS = 0.002  # of agreement, that smaller files may have


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    save_path: str | Path = "router.safetensors",
    config: TIDEConfig | None = None,
    *,
    seed: int = 0,
    quick: bool = False,
    resume: bool = False,
    compress: bool | None = None,
    epochs: float | None = None,
    start: str | Path | None = None,
    **settings: Any,
) -> RouterFile:
    """Train exit heads and routers for a model, place them, and save the router file.

    Args:
        save_path: ends in .safetensors or .pt.
        config: its calibration fields are read.
        seed: the same seed gives the same file on the same machine.
        quick: few, short texts and small steps of training: for a CPU, to try the calls.
        resume: continue an interrupted calibration with the same settings.
        compress: store heads in 8 bits; None: unless that costs agreement.
        epochs: passes over the texts in head training; None: as many as the time allows.
        start: a router file, or an EAGLE-3 head (folder or hub id), whose heads are trained on; None: fresh heads.
        settings: fields of `config` by the names that `tide calibrate` has for them: minutes, samples, dataset, strategy,
            bottleneck, checkpoint_interval, min_layers, label, prefill_exits.
    """
    path, config = Path(save_path), with_short_names(config, settings)
    check_suffix(path)
    check_dataset(config.calibration_dataset)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in. Create it first.")
    model, effort = unwrapped(model), QUICK if quick else FULL
    if epochs is not None:
        effort = replace(effort, schedule=replace(effort.schedule, epochs=epochs, least_steps=0))
    with _open(model) as adapter, tempfile.TemporaryDirectory(prefix="tide-states-") as folder:
        if config.prefill_exits:
            prompt_exits.check_model(adapter)
        made_for = fingerprint(model, tokenizer)
        begin = Start(adapter, config, seed, start)
        config = replace(config, exit_strategy=begin.strategy)
        identity = {"config": asdict(config), "seed": seed, "effort": asdict(effort), "model": asdict(made_for)}
        identity |= {} if start is None else {"start": [str(start), begin.content()]}
        work = Work(path, identity, resume)
        key = f"{made_for.weights or made_for.describe()}|{machine(adapter)}{'|work' if adapter.device.type == 'cuda' else ''}"
        asked = f"{config.calibration_dataset}|{config.calibration_samples}|{begin.strategy}|{effort.answer}"
        clock = Clock(config.calibration_minutes, f"{key}|{asked}", quick)
        clock.tell_few(adapter.device.type)
        budget = Budget(adapter.device, Path(folder))
        file = _Job(adapter, tokenizer, made_for, config, effort, seed, work, budget, key, clock, epochs, begin).run()
        file.save(path, _fits_8_bits(file) if compress is None else compress)
        work.finish()
    return file


@contextmanager
def _open(model: PreTrainedModel) -> Iterator[ModelAdapter]:
    adapter, threads = ModelAdapter(model), torch.get_num_threads()
    try:
        if not adapter.is_known:
            check_unknown(adapter)
        if adapter.device.type == "cuda":
            torch.set_num_threads(1)  # little work is left for the CPU, and threads would wait for each other
        yield adapter
    finally:
        torch.set_num_threads(threads)
        adapter.close()


@dataclass
class _Job:
    adapter: ModelAdapter
    tokenizer: PreTrainedTokenizerBase
    made_for: Fingerprint
    config: TIDEConfig
    effort: Effort
    seed: int
    work: Work
    budget: Budget
    key: str  # of timings
    clock: Clock
    epochs: float | None  # asked for
    start: Start

    def run(self) -> RouterFile:
        texts, depths = self._texts(), self.start.remembered()
        self.split = Split(
            collect(self.adapter, [t for t in texts if not t.is_held_out], depths, self.budget, "states to learn from"),
            collect(self.adapter, _some([t for t in texts if t.is_held_out]), depths, self.budget, "states to measure on"),
        )
        self.costs = measure_costs(self.adapter, self.key)
        self.tokens = ranked(self.adapter, self.split.train)
        held = self.start.file if self.start.has_own_vocabulary else None
        self.trained_on = training_vocabulary(self.adapter, self.tokens) if held is None else _on(held.vocabulary, self.adapter)
        self.choice: Choice | None = None
        self.steps: dict[int, int] = {}  # of training, by depth
        prompt_exit = None
        if self.config.prefill_exits:
            prompt_exit = prompt_exits.fit_prompt_exit(self.adapter, self.split, self.config.router_bottleneck_dim, self.seed)
        exits, candidates, tried = self._try_all()
        placed = place(candidates, tried, self.costs)
        file = self._file(exits, placed, len(texts))
        file.prompt_exit = prompt_exit
        return file

    def _texts(self) -> list[Text]:
        texts = self.work.texts()
        if texts is None:
            source, count = self.config.calibration_dataset, self._text_count()
            texts = load_texts(source, self.adapter.model, self.tokenizer, count, self.seed, self.effort.answer)
            self.work.keep_texts(texts)
        return texts

    def _text_count(self) -> int:
        most = min(self.config.calibration_samples or MOST, self.effort.samples)
        states = (MEMORIES + 2) * self.adapter.hidden_dim * self.adapter.model.dtype.itemsize * self.effort.text_tokens
        return self.clock.texts(self._texts_seconds, self._least_training_seconds, min(most, room(self.budget, states)))

    def _texts_seconds(self) -> Callable[[int], float]:
        """Measure how long texts and their states take."""
        logger.info("timing a few steps of writing, reading and training")
        collecting = self.effort.text_tokens * collecting_seconds(self.adapter)
        source, told = self.config.calibration_dataset, (self.tokenizer, self.seed, self.effort.answer)
        if source == "self":
            writing = writing_seconds(self.adapter.model, *told)
            return lambda count: writing(count) + count * collecting
        share = unanswered(source, self.tokenizer, self.seed)
        if not share:
            return lambda count: count * collecting
        answering = answering_seconds(self.adapter.model, *told)
        return lambda count: answering(math.ceil(share * count)) + count * collecting

    def _least_training_seconds(self) -> float:
        """Measure how long the least training of a head on the fewest texts takes on a CPU; a GPU takes little time for it."""
        if self.start.strategy == "identity" or self.adapter.device.type == "cuda":
            return 0.0
        depth, held = self.start.depths()[0], self.start.file if self.start.has_own_vocabulary else None
        tokens = torch.arange(min(CPU_LARGEST, self.adapter.vocab_size)) if held is None else held.vocabulary
        vocabulary = _on(tokens, self.adapter)
        states = trial(self.adapter, sorted({*self.start.remembered(), *self.start.inputs(depth)}))
        head, schedule = self.start.head(depth, [], vocabulary), self._schedule(vocabulary)
        each = step_seconds(self.adapter, head, Split(states, states), Exits(depth, vocabulary), schedule)
        batch = min(schedule.batch_tokens, FEWEST * self.effort.text_tokens)
        return (schedule.checks + TIMED_STEPS) * each * max(1.0, batch / TRIAL_TOKENS)

    def _try_all(self) -> tuple[dict[int, Exit], dict[int, Candidate], list[Placed]]:
        exits: dict[int, Exit] = {}
        candidates: dict[int, Candidate] = {}
        tried: list[Placed] = []
        for depth in self.start.depths():
            if exits and self.timer is not None and self.timer.is_over(depth):
                logger.info(NO_TIME, depth)
                break
            with extended(self.adapter, self.split, self.start.inputs(depth), self.budget):
                fitted = self._fit(depth, [*exits.values()])
                if fitted is None:
                    logger.info(NO_TIME, depth)
                    break
                self.steps[depth] = fitted.steps
                if self.choice is None and not self.start.has_own_vocabulary:
                    self.choice = self._choose(fitted.head, depth)
                if fitted.agreement and self.vocabulary is not self.trained_on:
                    fitted = fitted._replace(agreement=self._agreement(fitted.head, depth))
                where, steps = Exits(depth, self.vocabulary), self.effort.schedule.draft_steps
                trained = fitted.head.to(self.adapter.device)
                found = fit_router(
                    self.adapter, trained, self.split, where, self.config, steps, self.seed, f"router at depth {depth}"
                )
                in_8_bits = self._agreement_in_8_bits(fitted, depth)
            figures = {
                **found.figures,
                "agreement_by_step": [round(share, 4) for share in fitted.agreement],
                "agreement_in_8_bits": [round(share, 4) for share in in_8_bits],
            }
            exits[depth] = Exit(fitted.head.to("cpu", torch.bfloat16), found.router.to("cpu"), 1.0, figures)
            candidates[depth] = Candidate(found.trace, self._head_seconds(exits[depth], depth, self.vocabulary))
            tried.append(best_setting(candidates, (depth,), self.costs))
            logger.info("depth %d: agreement %s, %s", depth, figures["agreement_by_step"], tried[-1].row(self.costs))
            if self.start.strategy == "memory" and self.start.file is None and not is_worth_going_deeper(tried):
                break
        return exits, candidates, tried

    @property
    def timer(self) -> Clock | None:
        """The clock that heads are trained by; None: by epochs."""
        return self.clock if self.epochs is None else None

    def _fit(self, depth: int, before: list[Exit]) -> Fitted | None:
        """Train a head, or go on with one; None: there is no time for another one."""
        strategy, head = self.start.strategy, self.start.head(depth, before, self.trained_on)
        if strategy == "identity":
            return Fitted(head.eval(), [])
        kept = self.work.head(depth, head)
        if kept is not None:
            return kept._replace(head=kept.head.to(self.adapter.device))
        where, schedule = Exits(depth, self.trained_on), self._schedule(self.trained_on)
        begun = None
        if self.start.file is None:
            measure(self.adapter, head, self.split.train, depth)
        else:
            held = head.to(self.adapter.device)
            begun = Fitted(
                copy.deepcopy(held).eval(), agreement(self.adapter, held, self.split.valid, where, schedule.draft_steps)
            )
        if self.timer is not None:
            epochs = max(MOST_EPOCHS, schedule.epochs)
            most = max(schedule.least_steps, round(epochs * self.split.train.batch_count(schedule.batch_tokens)))
            steps = self.timer.steps(depth, lambda: step_seconds(self.adapter, head, self.split, where, schedule), most)
            if before and steps < schedule.checks:
                return None
            schedule = replace(schedule, steps=max(steps, schedule.checks))
        fitted = fit_head(self.adapter, head, self.split, where, schedule, self.seed, f"{strategy} head at depth {depth}")
        if begun is not None:
            fitted = _better(begun, fitted, depth)
        for tensor in (*fitted.head.parameters(), *fitted.head.buffers()):
            tensor.data = tensor.data.bfloat16().float()  # rounded as it will be stored
        self.work.keep_head(depth, fitted)
        return fitted

    def _schedule(self, vocabulary: torch.Tensor | None) -> Schedule:
        """Return the training schedule for this model and machine, for a head that is trained on these tokens."""
        size = self.adapter.vocab_size if vocabulary is None else len(vocabulary)
        schedule = self.effort.schedule.fitted_to(self.adapter.hidden_dim, size, self.adapter.device)
        if self.start.strategy == "lens":
            schedule = replace(schedule, epochs=LENS_EPOCHS * schedule.epochs)
        if self.start.file is not None:
            schedule = replace(schedule, learning_rate=GENTLY * schedule.learning_rate)
        return schedule if self.start.guesses_states else replace(schedule, state_weight=0.0)

    def _agreement_in_8_bits(self, fitted: Fitted, depth: int) -> list[float]:
        """Return the agreement of a head as it is read from a compressed file."""
        if not fitted.agreement:
            return []
        head = copy.deepcopy(fitted.head)
        restored = storage.restore(storage.compress({name: own.cpu() for name, own in head.state_dict().items()}))
        head.load_state_dict(restored)
        return self._agreement(head, depth)

    def _agreement(self, head: nn.Module, depth: int) -> list[float]:
        steps = self.effort.schedule.draft_steps
        return agreement(self.adapter, head, self.split.valid, Exits(depth, self.vocabulary), steps)

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """The draft vocabulary; None: all tokens."""
        if self.start.has_own_vocabulary:
            return self.trained_on
        assert self.choice is not None, "it is chosen with the first head"
        return self.choice.vocabulary

    def _choose(self, head: nn.Module, depth: int) -> Choice:
        """Choose the draft vocabulary with the first head."""
        timed = Exit(head, fresh_router(self.adapter, self.config, self.seed), 1.0)
        found = choose_vocabulary(
            *(self.adapter, head, depth, self.effort.schedule.draft_steps, self.split.valid, self.tokens, self.costs),
            lambda vocabulary: self._head_seconds(timed, depth, vocabulary),
        )
        logger.info("draft vocabulary: %s", found.words)
        return found

    def _head_seconds(self, exit_: Exit, depth: int, vocabulary: torch.Tensor | None) -> float:
        """Time an exit with a vocabulary."""
        strategy = self.start.strategy
        policy = CalibratedPolicy(RouterFile(strategy, {depth: exit_}, (depth,), 1, vocabulary), self.adapter)
        size = "all" if vocabulary is None else len(vocabulary)
        sizes = f"|{exit_.sizes}" if strategy == EAGLE3 else ""  # others have those of the model
        return measure_head(self.adapter, policy, depth, f"{self.key}|{strategy}|{depth}|{size}{sizes}")

    def _file(self, exits: dict[int, Exit], placed: list[Placed], texts: int) -> RouterFile:
        best = placed[0]
        for depth, threshold in zip(best.checkpoints, best.thresholds, strict=True):
            exits[depth].threshold = threshold
        speedup = best.tokens_per_second * self.costs.full_step
        if speedup < 1:
            logger.warning("on this machine exits are expected to be slower than none in mode exact: %.2fx.", speedup)
        facts = {
            "texts": texts,
            "source": self.config.calibration_dataset,
            "positions": {"trained": self.split.train.tokens, "held_out": self.split.valid.tokens},
            "seed": self.seed,
            **({} if self.start.file is None else {"start": str(self.start.source)}),
            "schedule": asdict(self._schedule(self.trained_on)),
            "steps": self.steps,
            "machine": machine(self.adapter),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        figures = {
            "placement": [one.row(self.costs) for one in placed],
            "expected_speedup": round(speedup, 3),
            "milliseconds": self.costs.milliseconds(),
        }
        if self.choice is not None:
            figures["draft_vocabulary"] = self.choice.words
            figures["draft_vocabularies"] = [one.row() for one in self.choice.measured]
        return RouterFile(
            strategy=self.start.strategy,
            exits={depth: exits[depth] for depth in best.checkpoints},
            checkpoints=best.checkpoints,
            max_pending=best.max_pending,
            vocabulary=None if self.vocabulary is None else self.vocabulary.cpu(),
            fingerprint=self.made_for,
            config=asdict(self.config),
            facts=facts,
            figures=figures,
        )


def _fits_8_bits(file: RouterFile) -> bool:
    """Return True if no exit loses agreement in 8 bits."""
    lost = [
        sum(own.figures["agreement_by_step"]) - sum(own.figures["agreement_in_8_bits"])
        for own in file.exits.values()
        if own.figures["agreement_by_step"]
    ]
    steps = max((len(own.figures["agreement_by_step"]) for own in file.exits.values()), default=0)
    return bool(lost) and max(lost) <= COST_OF_8_BITS * steps


def _better(begun: Fitted, fitted: Fitted, depth: int) -> Fitted:
    """Return what agrees more often: a head as it was, or as it was trained on."""
    steps = " ".join(f"{before:.3f} → {after:.3f}" for before, after in zip(begun.agreement, fitted.agreement, strict=True))
    is_better = sum(fitted.agreement) > sum(begun.agreement)
    logger.info("depth %d: trained on, agreement %s%s", depth, steps, "" if is_better else ": kept as it was")
    return fitted if is_better else begun


def _on(vocabulary: torch.Tensor | None, adapter: ModelAdapter) -> torch.Tensor | None:
    return None if vocabulary is None else vocabulary.to(adapter.device)


def _some(texts: list[Text]) -> list[Text]:
    return texts[:: -(-len(texts) // MEASURED) or 1]
