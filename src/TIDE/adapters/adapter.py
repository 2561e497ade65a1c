"""The adapter: any span of a model's decoder layers, run through the model's own `forward`.

Families differ in embedding, positions, masks, norms and logit scaling; `forward` does all of that. So each decoder layer gets
a *patch*: its class is replaced by a subclass whose `__call__` calls the adapter first.

    adapter.run(start=2, stop=4, hidden=h)

    forward:  embed → [0] → [1] → [2] → [3] → [4] → [5] → norm → LM head
    patches:    h enters at 0,     skip   run   run  skip  skip          only the requested positions

A skipped layer returns its input, so it costs one Python call and its hooks do not fire. The LM head is patched too: it
computes the logits of the requested positions, or none. Modules, parameters, hooks and names stay as they are. Outside `run`
every layer runs and the model behaves as before; `close` restores the classes.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from TIDE.adapters.lm_head import LMHeadWeight
from TIDE.adapters.patches import Patches
from TIDE.adapters.probe import input_device, known_family, layer_stores, probe_family, shared_sources
from TIDE.adapters.rope import rope_of
from TIDE.adapters.span import LayerFacts, SpanPass, pick
from TIDE.adapters.table import Family
from TIDE.adapters.weights import has_no_weights


class PassInputs(NamedTuple):
    """The tokens of one pass: n rows of q tokens each."""

    ids: torch.Tensor  # (n, q)
    positions: torch.Tensor  # (n, q), position of each token in its row
    mask: torch.Tensor | None  # (n, columns) 1 if the cache holds a token of the row there; None: all ones
    cache: Any  # a Cache with `leave_after_write` and `shared_view`, see engine/cache/segment_cache.py; None: store nothing
    embeds: torch.Tensor | None = None  # (n, q, hidden) instead of `ids`


class PassOutputs(NamedTuple):
    """The states and logits after a span of layers."""

    states: torch.Tensor  # (n, q, hidden) after the last layer of the span
    logits: torch.Tensor | None  # (n, kept, vocabulary)
    taps: dict[int, torch.Tensor]  # (n, q, hidden) at each requested depth


class ModelAdapter:
    """A model whose decoder layers can be run span by span. A model has one adapter at a time.

    Args:
        is_idle: returns True if another adapter may take the model over; None: none may.
    """

    def __init__(self, model: PreTrainedModel, is_idle: Callable[[], bool] | None = None) -> None:
        self.patches = Patches(self, is_idle)
        _refuse_what_cannot_work(model)
        self.model = model
        self.stores = layer_stores(model)
        known = known_family(model)
        self.is_known = known is not None
        self.family = known or probe_family(model)
        self.rope = rope_of(model)
        # Inference mode is quicker, but tensors that a forward stores on the model (frequencies of a rope that changes
        # with length, caches of unknown families) could not be used in training afterwards.
        harmless = self.is_known and self.rope.switches_at is None
        self.grad_off = torch.inference_mode if harmless else torch.no_grad
        self._facts = LayerFacts(type(model).__name__, self.family.answers, self.stores, shared_sources(model, self.stores))
        self._forward_takes = set(inspect.signature(model.forward).parameters)
        self._tasks = threading.local()  # per thread: another one may use the model normally during a pass
        self._patch()

    def follow(self) -> None:
        """Patch again if layers or the LM head were replaced since: PEFT wraps some in modules of its own."""
        layers, head = _layers_of(self.model, self.family), self.lm_head.module
        if self.layers == layers and (head is None or head is self.model.get_output_embeddings()):
            return
        if len(layers) != self.num_layers:
            raise ValueError(
                f"this {type(self.model).__name__} had {self.num_layers} layers when the engine was made and has {len(layers)} "
                f"now. Make a new engine with TIDE.TIDE(model, ...)."
            )
        self.close()
        self._patch()

    def _patch(self) -> None:
        """Patch every layer, and the LM head if it is a module of its own."""
        self.layers = _layers_of(self.model, self.family)
        self.lm_head = LMHeadWeight(self.model, self.is_known)
        self.patches.put(dict(enumerate(self.layers)) | ({} if self.lm_head.module is None else {None: self.lm_head.module}))

    @property
    def device(self) -> torch.device:
        """The device of the input tokens."""
        return input_device(self.model)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_dim(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of logits of a token, read off the head: configurations leave out padding rows."""
        nothing = torch.zeros(1, self.hidden_dim, device=self.device, dtype=self.model.dtype)
        return int(self.head(nothing).shape[-1])

    def close(self) -> None:
        """Remove the patches, which leaves the model as it was before."""
        self.patches.remove()

    def run(
        self,
        start: int,
        stop: int,
        inputs: PassInputs,
        *,
        hidden: torch.Tensor | None = None,
        keep: torch.Tensor | None = None,
        kv_of: Callable[[int], torch.Tensor] | None = None,
        taps: tuple[int, ...] = (),
        with_grad: bool = False,
    ) -> PassOutputs:
        """Run tokens through the layers [start, stop).

        Args:
            inputs: the tokens, their positions and the cache, opened for them.
            hidden: (n, q, hidden) their states at depth `start`; None: from the embedding (start must be 0).
            keep: (n, kept) indices into q of the requested logits; None: no logits.
            kv_of: store K/V in each layer of the span and nothing else, computed from the (n, q, hidden) states that this
                returns for the layer.
            taps: depths in [start, stop) whose states are returned too.
            with_grad: let gradients flow, from `hidden` and what the cache returns.
        """
        assert 0 <= start <= stop <= self.num_layers, (start, stop)
        assert hidden is not None or start == 0, "states are needed to start above the embedding"
        from_ids = inputs.embeds is None
        task = SpanPass(self._facts, self.lm_head, start, stop, hidden, keep, kv_of, inputs.cache, taps)
        given: dict[str, Any] = dict(
            attention_mask=inputs.mask, past_key_values=inputs.cache, use_cache=inputs.cache is not None
        )
        given |= dict(input_ids=inputs.ids) if from_ids else dict(inputs_embeds=inputs.embeds)
        if "position_ids" in self._forward_takes:
            given["position_ids"] = inputs.positions
        output = self._forward(task, given, with_grad)
        assert task.states is not None, "the span was left before its last layer"
        logits = None if keep is None else output.logits
        if keep is not None and self.lm_head.module is None:
            logits = pick(output.logits, keep)
        return PassOutputs(task.states, logits, task.tapped)

    def head(
        self,
        states: torch.Tensor,
        vocabulary: torch.Tensor | None = None,
        *,
        with_grad: bool = False,
    ) -> torch.Tensor:
        """Map (n, hidden) states to (n, vocabulary) logits by the model's final norm and LM head: the identity exit.

        Args:
            vocabulary: the token ids of the requested logits; None: all.
            with_grad: let gradients flow to `states`.
        """
        n = states.shape[0]
        keep = torch.zeros(n, 1, dtype=torch.long, device=states.device)
        hidden, last = states[:, None], self.num_layers
        task = SpanPass(self._facts, self.lm_head, last, last, hidden, keep, vocabulary=vocabulary)
        ids = torch.zeros(n, 1, dtype=torch.long, device=self.device)
        logits = self._forward(task, dict(input_ids=ids, use_cache=False), with_grad).logits[:, 0]
        if vocabulary is None or logits.shape[-1] == len(vocabulary):
            return logits
        return logits[:, vocabulary]

    def _forward(self, task: SpanPass, inputs: dict[str, Any], with_grad: bool) -> Any:
        self.patches.check()
        self._tasks.current = task
        try:
            with torch.enable_grad() if with_grad else self.grad_off():
                return self.model(**inputs, return_dict=True)
        finally:
            self._tasks.current = None

    def intercept(self, index: int | None, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a patched layer, or the LM head (index None), as the pass of this thread asks; without one, as it is."""
        task: SpanPass | None = getattr(self._tasks, "current", None)
        if task is None:
            return call(*args, **kwargs)
        return task.run_head(call, args, kwargs) if index is None else task.run_layer(index, call, args, kwargs)


def _layers_of(model: PreTrainedModel, family: Family) -> list[nn.Module]:
    return list(model.get_submodule(family.layers).children())


def _refuse_what_cannot_work(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"expected a Hugging Face model, found {name}. Load one with TIDE.load_model(name).")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; TIDE skips the layers of decoder-only (causal) models.")
    if not hasattr(model, "generate") or not callable(getattr(model, "get_decoder", None)):
        raise TypeError(f"{name} is not a causal LM. Load it with AutoModelForCausalLM.")
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{name} keeps no K/V cache: its forward takes no past_key_values, so none of its layers can be caught up by "
            f"position. Run it with model.generate."
        )
    if has_no_weights(model):
        raise ValueError(f"{name} has no weights: they are on the device meta. Load it with TIDE.load_model(name).")
    if model.training:
        raise ValueError(f"{name} is in train mode, where dropout makes every run different. Call model.eval() first.")
