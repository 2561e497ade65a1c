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
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from TIDE.adapters.patches import original_class, owner_of, patch, unpatch
from TIDE.adapters.probe import Store, input_device, known_family, layer_stores, probe_family, shared_sources
from TIDE.adapters.rope import rope_of
from TIDE.adapters.weights import has_no_weights, holds_numbers, read_linear, version
from TIDE.kernels.weights import Dense, Weight


class KVWritten(Exception):
    """An exception of the cache, raised to leave a layer as soon as its K/V are stored."""


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


@dataclass
class _Task:
    start: int
    stop: int
    hidden: torch.Tensor | None
    keep: torch.Tensor | None
    kv_of: Callable[[int], torch.Tensor] | None
    cache: Any
    taps: tuple[int, ...] = ()
    vocabulary: torch.Tensor | None = None
    with_grad: bool = False
    states: torch.Tensor | None = None
    tapped: dict[int, torch.Tensor] = field(default_factory=dict)


class _Rows(NamedTuple):
    """Rows of an LM head's weight and bias, with the weight they were copied from."""

    weight: torch.Tensor
    place: int
    version: int | None
    rows: tuple[torch.Tensor, torch.Tensor | None]

    def are_of(self, weight: torch.Tensor) -> bool:
        """Return True if `weight` is the one copied, unchanged: models are moved, trained and given other heads."""
        return self.weight is weight and (self.place, self.version) == (weight.data_ptr(), version(weight))


class ModelAdapter:
    """A model whose decoder layers can be run span by span. A model has one adapter at a time.

    Args:
        is_idle: returns True if another adapter may take the model over; None: none may.
    """

    def __init__(self, model: PreTrainedModel, is_idle: Callable[[], bool] | None = None) -> None:
        self._fitted: list[nn.Module] = []
        weakref.finalize(self, _unpatch_all, self._fitted).atexit = False  # when Python ends, nothing is put back
        self._is_idle = is_idle
        self._before: ModelAdapter | None = None  # that had the model
        self._was_replaced = False
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
        self._sources = shared_sources(model, self.stores)
        self.layers = self._own_layers()
        self._kept_rows: MutableMapping[torch.Tensor, _Rows] = WeakIdKeyDictionary()  # by vocabulary, as long as that lives
        self._forward_takes = set(inspect.signature(model.forward).parameters)
        self._tasks = threading.local()  # per thread: another one may use the model normally during a pass
        self._patch_all()

    def follow(self) -> None:
        """Patch again if layers or the LM head were replaced since: PEFT wraps some in modules of its own."""
        layers, head = self._own_layers(), self.model.get_output_embeddings()
        if self.layers == layers and (self._fitted[-1] is head or not self._head_is_patched):
            return
        if len(layers) != self.num_layers:
            raise ValueError(
                f"this {type(self.model).__name__} had {self.num_layers} layers when the engine was made and has {len(layers)} "
                f"now. Make a new engine with TIDE.TIDE(model, ...)."
            )
        self.close()
        self.layers = layers
        self._kept_rows.clear()
        self._patch_all()

    def _own_layers(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.family.layers).children())

    def _patch_all(self) -> None:
        """Patch every layer, and the LM head if it is a module of its own. An idle engine gives its model up."""
        held = owner_of(self.layers[0])
        if held is not None and held._is_idle is not None and held._is_idle():
            held.close()
            held._was_replaced = True
            self._before = held
        head = self.model.get_output_embeddings()
        self._head_is_patched = head is not None and head is not self.model.get_input_embeddings()
        try:
            for index, module in [*enumerate(self.layers), *([(None, head)] if self._head_is_patched else [])]:
                patch(module, self, index)
                self._fitted.append(module)
        except BaseException:
            self.close()
            raise

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

    @property
    def is_open(self) -> bool:
        return bool(self._fitted)

    def check_open(self) -> None:
        if self.is_open:
            return
        if self._was_replaced:
            raise RuntimeError(
                "this engine is closed: another one was made for its model. Use that one, or engine.using(config) for other "
                "settings."
            )
        raise RuntimeError("this engine is closed. Make a new one with TIDE.TIDE(model, ...).")

    def keep(self) -> None:
        """Keep a model that was taken over."""
        self._before = None

    def give_back(self) -> None:
        """Close, and let the engine have its model again that it was taken from."""
        self.close()
        if self._before is not None:
            self._before._was_replaced = False
            self._before._patch_all()
            self.keep()

    def close(self) -> None:
        """Remove the patches, which leaves the model as it was before."""
        _unpatch_all(self._fitted)

    @property
    def _task(self) -> _Task | None:
        return getattr(self._tasks, "current", None)

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
        task = _Task(start, stop, hidden, keep, kv_of, inputs.cache, taps, with_grad=with_grad)
        given: dict[str, Any] = dict(
            attention_mask=inputs.mask, past_key_values=inputs.cache, use_cache=inputs.cache is not None
        )
        given |= dict(input_ids=inputs.ids) if from_ids else dict(inputs_embeds=inputs.embeds)
        if "position_ids" in self._forward_takes:
            given["position_ids"] = inputs.positions
        output = self._forward(task, given)
        assert task.states is not None, "the span was left before its last layer"
        if keep is None:
            return PassOutputs(task.states, None, task.tapped)
        return PassOutputs(task.states, output.logits if self._head_is_patched else _pick(output.logits, keep), task.tapped)

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
        task = _Task(self.num_layers, self.num_layers, states[:, None], keep, None, None)
        task.vocabulary, task.with_grad = vocabulary, with_grad
        ids = torch.zeros(n, 1, dtype=torch.long, device=self.device)
        logits = self._forward(task, dict(input_ids=ids, use_cache=False)).logits[:, 0]
        if vocabulary is None or logits.shape[-1] == len(vocabulary):
            return logits
        return logits[:, vocabulary]

    def _forward(self, task: _Task, inputs: dict[str, Any]) -> Any:
        self.check_open()
        self._tasks.current = task
        try:
            with torch.enable_grad() if task.with_grad else self.grad_off():
                return self.model(**inputs, return_dict=True)
        finally:
            self._tasks.current = None

    def intercept(self, index: int | None, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a patched layer, or the LM head (index None), as the pass of this thread asks; without one, as it is."""
        if (task := self._task) is None:
            return call(*args, **kwargs)
        if index is None:
            return self._head(task, call, args, kwargs)
        return self._layer(index, task, call, args, kwargs)

    def _layer(self, index: int, task: _Task, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a decoder layer, or skip it."""
        given = args[0] if args else kwargs.pop("hidden_states")
        states = task.hidden if index == 0 and task.hidden is not None else given
        if index in task.taps:
            task.tapped[index] = states
        if index == task.start < task.stop:
            self._lend_shared_kv(task, kwargs)
        if task.start <= index < task.stop:
            given = states if task.kv_of is None else task.kv_of(index)
            states = self._run_layer(index, task, functools.partial(call, given, *args[1:], **kwargs), states)
        if index == task.stop - 1 or task.start == task.stop:
            task.states = states
        return (states, *[None] * (self.family.answers - 1)) if self.family.answers else states

    def _run_layer(self, index: int, task: _Task, call: Callable[[], Any], states: torch.Tensor) -> torch.Tensor:
        if task.kv_of is None:
            output = call()
            return output[0] if isinstance(output, tuple) else output
        if self.stores[index] is Store.KV:
            task.cache.leave_after_write = True
            try:
                call()
            except KVWritten:
                pass
            else:
                raise RuntimeError(f"layer {index} of {type(self.model).__name__} ran without handing K/V to the cache.")
            finally:
                task.cache.leave_after_write = False
        return states

    def _lend_shared_kv(self, task: _Task, kwargs: dict[str, Any]) -> None:
        """Give layers that read another layer's K/V those of the cache, if that layer is before the span."""
        for kind, source in self._sources.items():
            if source < task.start:
                kwargs["shared_kv_states"][kind] = task.cache.shared_view(source)

    def _head(self, task: _Task, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the LM head at the requested positions."""
        if task.keep is None:
            return args[0][..., :0]
        picked = _pick(args[0], task.keep)
        rows = None if task.vocabulary is None else self._head_rows(task.vocabulary)
        return call(picked, *args[1:], **kwargs) if rows is None else nn.functional.linear(picked, *rows)

    def head_rows(self, vocabulary: torch.Tensor) -> Weight:
        """Return the rows of the LM head's weight for some tokens; the head must be a linear layer without bias."""
        rows = self._head_rows(vocabulary)
        assert rows is not None and rows[1] is None
        return Dense(rows[0])

    @property
    def plain_head(self) -> Weight | None:
        """The weight of the LM head if it is a linear layer without bias, otherwise None."""
        head = self.model.get_output_embeddings()
        return read_linear(head) if self._head_is_linear and head.bias is None else None

    @property
    def _head_is_linear(self) -> bool:
        head = self.model.get_output_embeddings()
        return self.is_known and self._head_is_patched and original_class(head) is nn.Linear and holds_numbers(head.weight)

    def _head_rows(self, vocabulary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the LM head's weight and bias for some tokens, copied once; None if it is no plain linear layer."""
        if not self._head_is_linear:
            return None
        head = self.model.get_output_embeddings()
        kept = self._kept_rows.get(vocabulary)
        if kept is None or not kept.are_of(head.weight):
            with torch.inference_mode(False), torch.no_grad():
                bias = None if head.bias is None else head.bias[vocabulary].clone()
                rows = head.weight[vocabulary].clone(), bias
            self._kept_rows[vocabulary] = kept = _Rows(head.weight, head.weight.data_ptr(), version(head.weight), rows)
        return kept.rows


def _unpatch_all(modules: list[nn.Module]) -> None:
    while modules:
        unpatch(modules.pop())


def _pick(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Gather (n, q, d) values at (n, kept) indices into q -> (n, kept, d)."""
    return values.gather(1, keep.to(values.device)[..., None].expand(-1, -1, values.shape[-1]))


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
