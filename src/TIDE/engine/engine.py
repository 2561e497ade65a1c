"""The engine: what `import TIDE` is for.

    engine = TIDE.TIDE(model, router)         router None: every token runs all layers
    engine.generate(input_ids, max_new_tokens=64)

An engine patches the model's layers until it is closed; meanwhile the model can be used as ever. Each call has its own rows,
cache and counts, so an error or an interruption leaves nothing behind.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import CausalLMOutputWithPast

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.weights import is_quantized, unwrapped
from TIDE.config import MOST_ROWS, TIDEConfig, checked_config
from TIDE.engine.batch import Batch, Decoding
from TIDE.engine.cache.prefix_store import Texts, default_gib
from TIDE.engine.check import check_unknown, warn_where_tokens_are_not_alone
from TIDE.engine.forward import forward, laid_out, output_of, rows_of
from TIDE.engine.host.sampler import columns_of
from TIDE.engine.request.inputs import as_keywords, beside_rounds, check_ids, check_streamer, left_padding, take_ids
from TIDE.engine.request.options import OptionCache
from TIDE.engine.request.plan import Plan, make_plan
from TIDE.engine.request.request import Request, prepare, refuse_ropes_that_change
from TIDE.engine.rows.row import Counts, Row, total
from TIDE.engine.rows.stop import context_of
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.select import select_runner
from TIDE.engine.slots.drafter import why_not_planned
from TIDE.engine.warm_up import warm_up
from TIDE.kernels.dispatch import wrong_dtype
from TIDE.prompt_exits.prefill import prompt_exit_of, prompt_pass
from TIDE.routing.policies import for_model, policy_for
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router_file import RouterFile
from TIDE.routing.source import load_router
from TIDE.stats import ExitStats

logger = logging.getLogger(__name__)


class _Settings(NamedTuple):
    """How requests are decoded."""

    config: TIDEConfig
    policy: ExitPolicy | None
    plan: Plan


class TIDE:
    """A causal LM that is decoded with early exits.

    Args:
        model: a Hugging Face causal LM in eval mode, or PEFT's around one. It is not changed beyond `close`. It has one engine
            at a time: an idle one gives it up.
        router: the path of a router file, a folder or hub id with one or an EAGLE-3 head, a `RouterFile`, an `ExitPolicy`, or
            None for no exits.
        config: see `TIDEConfig`.
        router_path: another name for `router`, that of the original system.

    Attributes:
        file: the router file, an imported head as it is read for this model; None: the engine was made without one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        router: str | Path | RouterFile | ExitPolicy | None = None,
        config: TIDEConfig | None = None,
        *,
        router_path: str | Path | None = None,
    ) -> None:
        if router is not None and router_path is not None:
            raise TypeError("expected router or router_path, which mean the same, found both. Leave one out.")
        router = router_path if router is None else router
        if router is not None and not isinstance(router, str | Path | RouterFile | ExitPolicy):
            expected = "a path, a RouterFile, an ExitPolicy, or None (no exits)"
            raise TypeError(f"router must be {expected}, found {type(router).__name__}.")
        config = checked_config(config)
        self.model = model = unwrapped(model)
        router = load_router(router) if isinstance(router, str | Path) else router
        own = weakref.ref(self)
        self.file: RouterFile | None
        policy: ExitPolicy | None
        self.adapter = ModelAdapter(model, lambda: (engine := own()) is None or engine.is_idle)
        self._context = context_of(model)
        try:
            if not self.adapter.is_known:
                check_unknown(self.adapter)
            elif is_quantized(model):
                warn_where_tokens_are_not_alone(self.adapter)
            self.runner = select_runner(self.adapter)
            _warn_of_dtype(self.runner)
            if isinstance(router, RouterFile):
                self.file = for_model(router, self.adapter)
                policy = policy_for(self.file, self.adapter, self.runner.head)
            else:
                self.file, policy = None, router
            self._prompt_exit = prompt_exit_of(self.file or policy, self.adapter)
            self._settings = _Settings(config, policy, self._make_plan(config, policy))
        except BaseException:
            self.adapter.patches.give_back()
            raise
        self.adapter.patches.keep()
        self._others: ContextVar[_Settings | None] = ContextVar("settings", default=None)  # of `using`, in its thread or task
        self.scheduler = Scheduler()
        limit = config.cache_gib if self.adapter.device.type == "cpu" else None
        self.texts = Texts(default_gib(model) if limit is None else limit)
        self.warned: set[str] = set()
        self.last_rows: list[Row] = []
        self._batch: Batch | None = None
        self._adding = threading.Lock()
        self._sharing = threading.RLock()  # of `_batch`
        self._has_stepped = True  # since a row was added
        self._remembered = OptionCache()
        self._counts = Counts(self.adapter.num_layers)

    @property
    def _in_use(self) -> _Settings:
        return self._others.get() or self._settings

    @property
    def config(self) -> TIDEConfig:
        """The settings; inside `using`, those."""
        return self._in_use.config

    @property
    def policy(self) -> ExitPolicy | None:
        """The exits in use; None: every token runs all layers."""
        return self._in_use.policy

    @property
    def plan(self) -> Plan:
        """The settings and the exits, resolved for the model."""
        return self._in_use.plan

    @property
    def last_stats(self) -> ExitStats:
        """Counts of the last request: those of its rows together. `last_rows` has them one by one."""
        return total(self.last_rows, self.adapter.num_layers)

    @property
    def total_stats(self) -> ExitStats:
        """Counts of all requests so far, those included that are running or were broken off."""
        return self._counts.all()

    @property
    def is_idle(self) -> bool:
        """True if no request is running, no stream open and no row added that has not ended."""
        return not self._counts.running and (self._batch is None or not self._batch.rows)

    @property
    def capture_seconds(self) -> float:
        """Seconds spent so far on capturing CUDA graphs."""
        return self.runner.graphs.seconds if isinstance(self.runner, DeviceRunner) else 0.0

    @property
    def cache_use(self) -> tuple[float, float]:
        """GiB of K/V that rows have now, and that there are for them, where K/V are in blocks (on a GPU)."""
        return self.runner.pool.use if isinstance(self.runner, DeviceRunner) else (0.0, 0.0)

    @property
    def without_graphs(self) -> str | None:
        """Why the model is not run in CUDA graphs; None: it is. On a GPU the first request tells."""
        if not isinstance(self.runner, DeviceRunner):
            return self.runner.reason or f"there are none for it on {self.adapter.device.type}"
        return self.runner.failed or self.runner.graphs.without

    @property
    def backend(self) -> str:
        """The runner of the model's layers, in words, and why it is not a faster one. On a GPU the first request decides it."""
        why = why_not_planned(self.plan, self.policy) if isinstance(self.runner, DeviceRunner) else None
        return self.runner.words + (f"; rounds on the host: {why}" if why else "")

    def generate(
        self,
        inputs: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Continue prompts, as `model.generate` does.

        Args:
            inputs: (rows, tokens) left-padded ids, or what a tokenizer gives. Also by name: input_ids, attention_mask, or
                inputs_embeds (rows, tokens, hidden). None: the model's first token (BOS), as in `model.generate`.
            streamer: gets the prompts, then every token once it is final.
            options: `GenerationConfig` fields, logits_processor, stopping_criteria, stop_strings and tokenizer. Also seed (an
                integer, or one for each row), presence_penalty and frequency_penalty of new tokens, logit_bias
                {token: number}, and cache_salt: prompts that begin alike share K/V if they have the same one.

        Returns:
            (rows, tokens) prompts and continuations (after inputs_embeds alone, continuations only); with
            `return_dict_in_generate`, what `model.generate` returns then, without its cache.
        """
        began = time.perf_counter()
        if streamer is not None:
            check_streamer(streamer)
        self._check_usable()
        request = self._prepare(as_keywords(inputs, options), generation_config)
        if streamer is not None:
            streamer.put(request.ids.cpu())
        return self._answer(request, streamer, began)

    def answer(self, request: Request, streamer: BaseStreamer | None = None) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode what transformers has prepared: see `TIDE.custom_generate`. A streamer gets new tokens only."""
        began = time.perf_counter()
        self._check_usable()
        if request.embeds is None:
            check_ids(self.model, request.ids)
        self._context.check(request.longest, room_for=1)
        refuse_ropes_that_change(request, self.adapter.rope.switches_at)
        return self._answer(request, streamer, began)

    def _answer(
        self, request: Request, streamer: BaseStreamer | None, began: float
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        rows = (decoding := self._decoding(request, began)).rows
        if streamer is None:
            with self._counts.counted(rows), rows[0].stats.seconds.measured():
                for _ in decoding.run():
                    pass
        else:
            for column in self._counted_columns(decoding):
                streamer.put(column)
            streamer.end()
        ids, config = request.output(rows), request.config
        if not config.return_dict_in_generate:
            return ids
        asked = dict(scores=config.output_scores, logits=config.output_logits)
        return GenerateDecoderOnlyOutput(
            sequences=ids, **{name: columns_of(name, rows) for name, wanted in asked.items() if wanted}
        )

    def stream(
        self,
        inputs: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        shares: bool = False,
        **options: Any,
    ) -> Iterator[int]:
        """Yield the new tokens of one prompt as they become final. Takes what `generate` takes; with `shares` the prompt begins
        with K/V of texts that begin alike also in 16 bits on the host, where the order of sums may show."""
        began = time.perf_counter()
        self._check_usable()
        request = self._prepare(as_keywords(inputs, options), generation_config)
        if len(request.ids) != 1:
            raise ValueError(
                f"stream takes one prompt, found {len(request.ids)}. Use generate(..., streamer=...) or one stream per prompt."
            )
        decoding = self._decoding(request, began)
        decoding.rows[0].shares = shares
        return (int(column) for column in self._counted_columns(decoding))

    def add(
        self,
        inputs: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        config: TIDEConfig | None = None,
        exits: bool = True,
        **options: Any,
    ) -> Row:
        """Add a prompt to the batch and return its row, which `step` decodes with others. Any thread may call it.

        Args:
            config: settings of this row, its mode and threshold among them; None: the engine's.
            exits: False: every token of it runs all layers.
            options: what `generate` takes.

        Returns:
            `row.new_tokens` grows from step to step until `row.finished`. Where something of its own went wrong, `row.error`
            says what. `row.stats` counts.
        """
        options = as_keywords(inputs, options)
        with self._adding:
            self._check_usable(is_known=not self._has_stepped and bool(self._shared_batch().rows))
            with beside_rounds(self.adapter.device, options) as own:
                request = self._prepare(own, generation_config)
                if len(request.padding) != 1:
                    raise ValueError(f"add takes one prompt, found {len(request.padding)}. Call it once for each.")
                (row,) = request.rows(self.adapter.num_layers, self._context)
            policy = self.policy if exits else None
            plan = self.plan if config is None and exits else self._make_plan(config or self.config, policy)
            with self._sharing:
                self._counts.begin(row)
                self._shared_batch().add([row], plan, policy)
            self._has_stepped = False
        return row

    def warm_up(self, rows: int = 1, tokens: int = 992, progress: bool = True) -> None:
        """Compile and capture, ahead of requests, what up to `rows` rows of up to `tokens` tokens need: see `warm_up.py`."""
        self._check_usable()
        warm_up(self, rows, tokens, progress)

    def step(self) -> list[Row]:
        """Give every row of the batch a round, and return the rows that got tokens or ended. Threads take turns."""
        self.adapter.patches.check()  # the rest is checked when a row is added: it takes as long as a round
        self._has_stepped = True
        batch, changed = self._shared_batch(), list[Row]()
        try:
            step = batch.step(changed)
            self._counts.saw_step(step.rows, changed, step.seconds)
            return changed
        except BaseException:
            batch.open.report_again(changed)
            raise

    def remove(self, row: Row) -> None:
        """Take a row out of the batch before it has ended; nothing happens to one that has. Any thread may call it."""
        if not isinstance(row, Row):
            raise TypeError(f"remove takes a row that `add` returned, found {type(row).__name__}.")
        self._counts.remove(row)

    def _shared_batch(self) -> Batch:
        """Return the batch of rows that come and go."""
        with self._sharing:
            if self._batch is None or (self._batch.runner is not self.runner and not self._batch.rows):
                self._batch = Batch(self, self.adapter.device, most_rows=MOST_ROWS)
            return self._batch

    def __call__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor, ...]:
        """Run given tokens, as `model(input_ids)` does: in mode "fast" with the exit's logits where a token exits.

        Args:
            input_ids: (rows, tokens), left-padded.
            labels: (rows, tokens) as the model takes them; the loss is the model's own.
            return_dict: False: a tuple.

        Returns:
            `.logits` (rows, tokens, vocabulary), zeros where there is padding; `.loss` where there are labels. No cache, no
            gradients.
        """
        self._check_usable()
        ids = check_ids(self.model, input_ids)
        padding = left_padding(attention_mask, ids.shape)
        self._context.check(ids.shape[1] - min(padding), room_for=0)
        rows = self.last_rows = rows_of(self.plan, self.policy, ids, padding, self.adapter.num_layers)
        with self._counts.counted(rows), rows[0].stats.seconds.measured():
            logits = laid_out(forward(self.runner, self.plan, self.policy, rows), ids, padding)
        output = output_of(self.model, logits, labels, padding)
        return output.to_tuple() if return_dict is False else output

    @contextmanager
    def using(self, config: TIDEConfig, exits: bool = True) -> Iterator[None]:
        """Other settings for what this thread (or asyncio task) asks for inside; afterwards they are as they were, whatever
        happened.

        Args:
            config: takes the place of the engine's own.
            exits: False: every token runs all layers.
        """
        self._check_usable()
        policy = self.policy if exits else None
        before = self._others.set(_Settings(config, policy, self._make_plan(config, policy)))
        try:
            yield
        finally:
            self._others.reset(before)

    def close(self) -> None:
        """Leave the model as it was handed in. The engine cannot be used afterwards; its rows end with an error."""
        try:
            if self._batch is not None:
                for row in self._batch.rows:
                    row.fail(RuntimeError("the engine was closed before this text had ended."))
                self._batch.close()
        finally:
            self.texts.clear()
            self.adapter.close()

    def __repr__(self) -> str:
        model, depths = self.model, [span.start for span in self.plan.spans[1:]]
        name = Path(str(getattr(model.config, "name_or_path", "") or "")).name
        exits = f"exits at depth {', '.join(map(str, depths))}" if depths else "exits off"
        facts = [
            f"{type(model).__name__}{f' {name}' if name else ''}, {self.adapter.num_layers} layers",
            *(exits, f"mode {self.config.effective_mode}"),
            self.backend if self.adapter.patches.are_there else "closed",
        ]
        return f"TIDE({'; '.join(facts)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: a model has one engine at a time."""
        raise TypeError("an engine cannot be copied or pickled: it belongs to its model. Make one for a copy of the model.")

    def __enter__(self) -> TIDE:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_plan(self, config: TIDEConfig, policy: ExitPolicy | None) -> Plan:
        plan = make_plan(config, policy, self.adapter)
        return replace(plan, prompt_pass=prompt_pass(config, policy, self._prompt_exit, self.adapter))

    def _prepare(self, options: dict[str, Any], generation_config: GenerationConfig | None) -> Request:
        """Check a prompt and let transformers make sense of the options; without a prompt the model's first token is one."""
        ids = take_ids(self.model, options, self._context)
        vocabulary = self.adapter.vocab_size if options.get("logit_bias") else 0
        request = prepare(self.model, ids, generation_config, options, vocabulary, self._remembered)
        refuse_ropes_that_change(request, self.adapter.rope.switches_at)
        return request

    def _check_usable(self, is_known: bool = False) -> None:
        """Refuse what cannot be decoded, and follow a model that has changed; `is_known`: it was looked at a moment ago."""
        self.adapter.patches.check()
        if self.model.training:
            raise ValueError("the model is in train mode, where dropout makes every run different. Call model.eval() first.")
        if is_known:
            return
        self.adapter.follow()
        if self.runner.snapshot is not None and not self.runner.snapshot.matches(self.model):
            self.runner = select_runner(self.adapter)  # weights may have been exchanged; hooks keep a model as it is
        self.runner.follow()

    def _decoding(self, request: Request, began: float) -> Decoding:
        """Return what decodes a request."""
        rows = self.last_rows = request.rows(self.adapter.num_layers, self._context)
        rows[0].stats.seconds.whole = time.perf_counter() - began
        return Decoding(self, self.plan, self.policy, request, rows)

    def _counted_columns(self, decoding: Decoding) -> Iterator[torch.Tensor]:
        """Yield the columns of new tokens. Time between them is not counted."""
        rows, columns = decoding.rows, decoding.columns()
        with self._counts.counted(rows):
            while True:
                with rows[0].stats.seconds.measured():
                    column = next(columns, None)
                if column is None:
                    return
                yield column


def _warn_of_dtype(runner: Runner) -> None:
    """Say what to do where the model's dtype keeps it from compiled layers; quantized weights cannot be converted."""
    model = runner.adapter.model
    if runner.reason is not None and runner.reason == wrong_dtype(runner.device, model.dtype) and not is_quantized(model):
        logger.warning(
            "no compiled layers: %s, so TIDE is about as fast as model.generate. Call model.float() before the engine is made, "
            "or load the model with dtype=torch.float32.",
            runner.reason,
        )
