"""The engine: what `import TIDE` is for.

    engine = TIDE.TIDE(model, router)         router None: every token runs all layers
    engine.generate(input_ids, max_new_tokens=64)

An engine opens a window onto the model and closes it again; between the two the model can be used as ever. Each
call has its own rows, cache and counts, so an error or an interruption leaves nothing behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from TIDE.adapters.weights import is_quantized, unwrapped
from TIDE.adapters.window import Window
from TIDE.config import TIDEConfig
from TIDE.engine.batch import Batch, Decided
from TIDE.engine.check import check_unknown, warn_where_tokens_are_not_alone
from TIDE.engine.decoder import Decoder
from TIDE.engine.drafting import Pace
from TIDE.engine.forward import forward
from TIDE.engine.fused import fuse
from TIDE.engine.own_layers import OwnLayers
from TIDE.engine.plan import make_plan
from TIDE.engine.request import (
    Request,
    check_context,
    check_ids,
    context_limit,
    left_padding,
    prepare,
    refuse_ropes_that_change,
)
from TIDE.engine.round_layers import RoundLayers
from TIDE.engine.rounds import suits
from TIDE.engine.sampling import Chooser
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router_file import RouterFile
from TIDE.stats import ExitStats

logger = logging.getLogger(__name__)
FIRST_ROOM = 256  # new tokens a cache has room for before it grows


class TIDE:
    """A causal LM whose easy tokens leave early.

    Args:
        model: a Hugging Face causal LM in eval mode, or PEFT's around one. It is not changed beyond `close`.
        router: the path of a router file, an `ExitPolicy`, or None for no exits.
        config: see `TIDEConfig`.
    """

    def __init__(
        self, model: PreTrainedModel, router: str | Path | ExitPolicy | None = None, config: TIDEConfig | None = None
    ) -> None:
        if router is not None and not isinstance(router, str | Path | ExitPolicy):
            raise TypeError(f"router must be a path, an ExitPolicy, or None (no exits), found {type(router).__name__}.")
        if config is not None and not isinstance(config, TIDEConfig):
            raise TypeError(f"config must be a TIDEConfig, found {type(config).__name__}.")
        self.model = model = unwrapped(model)
        self.config = config or TIDEConfig()
        file, policy = (RouterFile.load(router), None) if isinstance(router, str | Path) else (None, router)
        self.window = Window(model)
        try:
            if not self.window.is_known:
                check_unknown(self.window)
            elif is_quantized(model):
                warn_where_tokens_are_not_alone(self.window)
            fuse(self.window)
            self.policy = file.policy(self.window) if file else policy
            self.plan = make_plan(self.config, self.policy, self.window)
        except BaseException:
            self.window.close()
            raise
        self.pace = Pace()
        self.last_stats = ExitStats(self.window.num_layers)
        self.last_decided: list[list[Decided]] = []  # of each row of the last request: where its new tokens were decided
        self._over = ExitStats(self.window.num_layers)  # of all requests that are over
        self._going: dict[int, ExitStats] = {}  # of those that are not, by id

    @property
    def total_stats(self) -> ExitStats:
        """Counts of all requests so far, those included that are going on or were broken off."""
        return sum(self._going.values(), start=self._over)

    @property
    def capture_seconds(self) -> float:
        """Spent so far on capturing CUDA graphs."""
        return self.window.fused.circuits.capture_seconds if isinstance(self.window.fused, RoundLayers) else 0.0

    @property
    def without_graphs(self) -> str | None:
        """Why the model is not run in CUDA graphs; None: it is. On a GPU the first request tells."""
        fused = self.window.fused
        if not isinstance(fused, RoundLayers):
            return self.window.why_plain or f"there are none for it on {self.window.device.type}"
        return fused.without_rounds or fused.circuits.without_graphs

    @property
    def backend(self) -> str:
        """What runs the model's layers, in words. On a GPU the first request tells."""
        fused, plain = self.window.fused, self.window.why_plain
        if fused is None:
            return "the model's own layers" + (f": {plain}" if plain else "")
        layers = "the model's own layers" if isinstance(fused, OwnLayers) else f"fused layers on {self.window.device.type}"
        if not isinstance(fused, RoundLayers):
            return layers
        return f"{layers}, without graphs: {self.without_graphs}" if self.without_graphs else f"{layers}, in CUDA graphs"

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Continue prompts, as `model.generate` does.

        Args:
            input_ids: (rows, tokens), left-padded, with `attention_mask` among the options where there is padding.
            streamer: gets the prompts, then every token once it is final.
            options: `GenerationConfig` fields, attention_mask, logits_processor, stopping_criteria, stop_strings and tokenizer.

        Returns:
            (rows, tokens) prompts and continuations.
        """
        began = time.perf_counter()
        request = self._prepare(input_ids, generation_config, options)
        if streamer is not None:
            streamer.put(request.ids.cpu())
        return self._answer(request, streamer, began)

    def answer(self, request: Request, streamer: BaseStreamer | None = None) -> torch.Tensor:
        """Decode what transformers has prepared: see `TIDE.custom_generate`. A streamer gets new tokens only."""
        began = time.perf_counter()
        self._check_usable()
        check_ids(self.model, request.ids)
        lengths = [request.ids.shape[1] - pad for pad in request.padding]
        check_context(self.model, lengths, room_for=1)
        refuse_ropes_that_change(request, self.window.rope.switches_at, context_limit(self.model))
        return self._answer(request, streamer, began)

    def _answer(self, request: Request, streamer: BaseStreamer | None, began: float) -> torch.Tensor:
        decoder = self._decoder(request, began)
        if streamer is None:
            self._finish(decoder)
        else:
            for column in self._columns(decoder, request):
                streamer.put(column.cpu())
            streamer.end()
        return decoder.batch.output(request.pad_token_id).to(request.ids.device)

    def stream(
        self,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig | None = None,
        after: Callable[[Decoder], None] | None = None,
        **options: Any,
    ) -> Iterator[int]:
        """Yield the new tokens of one prompt as they become final. Takes what `generate` takes.

        Args:
            after: is shown what will decode, before it does: see `TIDE.Conversation`.
        """
        began = time.perf_counter()
        request = self._prepare(input_ids, generation_config, options)
        if len(request.ids) != 1:
            raise ValueError(
                f"stream takes one prompt, found {len(request.ids)}. Use generate(..., streamer=...) or one stream per prompt."
            )
        decoder = self._decoder(request, began)
        if after is not None:
            after(decoder)
        return (int(column) for column in self._columns(decoder, request))

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(rows, tokens, vocabulary) logits of every position; in mode "fast", the exit's where a token exits.

        Positions of padding hold zeros.
        """
        self._check_usable()
        ids = check_ids(self.model, input_ids)
        padding = left_padding(attention_mask, ids)
        check_context(self.model, [ids.shape[1] - pad for pad in padding], room_for=0)
        stats = self.last_stats = ExitStats(self.window.num_layers)
        with self._counted(stats), stats.seconds.measured():
            return forward(self.window, self.plan, self.policy, ids, padding, stats)

    @contextmanager
    def using(self, config: TIDEConfig, exits: bool = True) -> Iterator[None]:
        """Other settings for what is asked for inside; afterwards the engine is as it was, whatever happened.

        Args:
            config: takes the place of the engine's own.
            exits: False: every token runs all layers.
        """
        self._check_usable()
        held = self.config, self.policy, self.plan
        policy = self.policy if exits else None
        plan = make_plan(config, policy, self.window)
        self.config, self.policy, self.plan = config, policy, plan
        try:
            yield
        finally:
            self.config, self.policy, self.plan = held

    def close(self) -> None:
        """Leave the model as it was handed in. The engine cannot be used afterwards."""
        self.window.close()

    def __enter__(self) -> TIDE:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, input_ids: torch.Tensor, generation_config: GenerationConfig | None, options: dict[str, Any]) -> Request:
        self._check_usable()
        ids = check_ids(self.model, input_ids)
        padding = left_padding(options.get("attention_mask"), ids)
        check_context(self.model, [ids.shape[1] - pad for pad in padding], room_for=1)
        request = prepare(self.model, ids, generation_config, options)
        refuse_ropes_that_change(request, self.window.rope.switches_at, context_limit(self.model))
        return request

    def _check_usable(self) -> None:
        if not self.window.is_open:
            raise RuntimeError("this engine is closed. Make a new one with TIDE.TIDE(model, ...).")
        if self.model.training:
            raise ValueError("the model is in train mode, where dropout makes every run different. Call model.eval() first.")
        self.window.follow()
        if self.window.parts is not None and not self.window.parts.are_those_of(self.model):
            fuse(self.window)  # weights may have been exchanged; hooks keep a model as it is

    def _decoder(self, request: Request, began: float) -> Decoder:
        """What runs a request. In rounds the device has a text of its own, so the host keeps the other."""
        wanted = request.config.max_length or request.ids.shape[1]
        ids = request.ids.cpu() if suits(self.window, self.plan, self.policy, request) else request.ids
        batch = Batch(ids, request.padding, request.criteria, context_limit(self.model))
        chooser = Chooser(request.processors, request.config.do_sample, batch)
        capacity = min(wanted, request.ids.shape[1] + FIRST_ROOM) + self.plan.max_pending
        decoder = Decoder(self.window, self.plan, self.policy, batch, chooser, capacity, self.pace, request=request)
        self.last_stats, self.last_decided = decoder.stats, batch.decided
        self.last_stats.seconds.whole = time.perf_counter() - began
        return decoder

    @contextmanager
    def _counted(self, stats: ExitStats) -> Iterator[None]:
        """A request is part of `total_stats` from its first step on, however it ends."""
        self._going[id(stats)] = stats
        try:
            yield
        finally:
            del self._going[id(stats)]
            self._over += stats

    def _columns(self, decoder: Decoder, request: Request) -> Iterator[torch.Tensor]:
        """The columns of new tokens, each as soon as it is final in every row. What happens between them is not timed."""
        columns = self._final_columns(decoder, request)
        with self._counted(decoder.stats):
            while True:
                with decoder.stats.seconds.measured():
                    column = next(columns, None)
                if column is None:
                    return
                yield column

    def _finish(self, decoder: Decoder) -> None:
        """Decode to the end, with nobody looking on."""
        with self._counted(decoder.stats), decoder.stats.seconds.measured():
            for _ in decoder.run():
                pass
        self._warn_where_cut_short(decoder)

    def _final_columns(self, decoder: Decoder, request: Request) -> Iterator[torch.Tensor]:
        batch, shown = decoder.batch, request.ids.shape[1]
        for _ in decoder.run():
            for column in range(shown, batch.final_columns()):
                yield batch.column(column, request.pad_token_id)
            shown = max(shown, batch.final_columns())
        self._warn_where_cut_short(decoder)

    def _warn_where_cut_short(self, decoder: Decoder) -> None:
        rows = [row for row, cut in enumerate(decoder.batch.cut_short) if cut]
        if rows:
            logger.warning("stopped at the model's context of %d tokens in rows %s.", max(decoder.batch.size), rows)
