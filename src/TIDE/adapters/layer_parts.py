"""Descriptions of decoder layers, for compiled layers: which module is which part, and how the parts are put together.

`LAYERS` has a line for each layer class: the names of its modules where they differ from Llama's, and its arrangement. Sizes,
biases, norms' kinds, windows and multipliers are read from the modules themselves. A layer that does anything else (adapters,
quantized projections, experts, clipped projections) has no parts and runs as its own modules. A new family is one line and one
test parameter.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from TIDE.adapters.rope import rope_kinds
from TIDE.adapters.weights import READERS, is_stock
from TIDE.kernels.layer import GELU, GELU_TANH, MLP, SILU, Attention, Layer, Norm, no_norm
from TIDE.kernels.weights import Weight, dense, some_rows


class Names(NamedTuple):
    """Module names of a decoder layer's parts; "" for parts it does not have. The defaults are Llama's."""

    attention_norm: str = "input_layernorm"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    qkv: str = "q_proj k_proj v_proj"  # or one module that has all three
    o: str = "o_proj"
    q_norm: str = ""
    k_norm: str = ""
    gate_up: str = "gate_proj up_proj"  # or one module that has both, or with `is_gated` off the only one
    down: str = "down_proj"
    activation: str = "act_fn"
    is_gated: bool = True
    is_parallel: bool = False
    is_capped: bool = False  # attention passes its `attn_logit_softcapping` on


LLAMA = Names()
GEMMA_2 = Names(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
OLMO_2 = Names(
    attention_norm="",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_out_norm="post_feedforward_layernorm",
    q_norm="q_norm",
    k_norm="k_norm",
)
PHI = Names(mlp_norm="", o="dense", gate_up="fc1", down="fc2", activation="activation_fn", is_gated=False, is_parallel=True)

LAYERS = {
    "Gemma2DecoderLayer": GEMMA_2._replace(is_capped=True),
    "Gemma3DecoderLayer": GEMMA_2._replace(q_norm="q_norm", k_norm="k_norm"),
    "GemmaDecoderLayer": LLAMA,
    "GraniteDecoderLayer": LLAMA,
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Olmo2DecoderLayer": OLMO_2,
    "Olmo3DecoderLayer": OLMO_2,
    "OlmoDecoderLayer": LLAMA,
    "Phi3DecoderLayer": Names(qkv="qkv_proj", gate_up="gate_up_proj", activation="activation_fn"),
    "PhiDecoderLayer": PHI,
    "Qwen2DecoderLayer": LLAMA,
    "Qwen3DecoderLayer": Names(q_norm="q_norm", k_norm="k_norm"),
    "SmolLM3DecoderLayer": LLAMA,
    "StableLmDecoderLayer": LLAMA,
    "Starcoder2DecoderLayer": Names(gate_up="c_fc", down="c_proj", activation="act", is_gated=False),
}
ACTIVATIONS = {
    "SiLU": SILU,
    "SiLUActivation": SILU,
    "GELUTanh": GELU_TANH,
    "NewGELUActivation": GELU_TANH,
    "GELUActivation": GELU,
}
ACTIVATIONS |= {"PytorchGELUTanh": GELU_TANH}  # its name in older transformers
WITH_OFFSET = {"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm"}  # their weights are around 0


class Projection(NamedTuple):
    """Weight and bias of a linear map; a bias that it does not have is empty."""

    weight: Weight
    bias: torch.Tensor


def norm_parts(norm: Any, like: torch.Tensor) -> Norm:
    """Return what a norm computes with; None gives the norm that layers have in place of none.

    Dtype and device of weights that a norm does not have are those of `like`.
    """
    none, name = torch.zeros(0), type(norm).__name__
    if norm is None:
        return no_norm(none)
    if name == "OlmoLayerNorm":
        return Norm(like.new_ones(norm.normalized_shape), 1e-5, 0.0, True, none)
    if name == "LayerNorm":
        return Norm(norm.weight, norm.eps, 0.0, True, none if norm.bias is None else norm.bias)
    assert name.endswith("RMSNorm"), f"expected a norm of LAYERS, found {name}: add what it computes here"
    eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)
    return Norm(norm.weight, eps, float(name in WITH_OFFSET), False, none)


def layer_parts(layer: Any, config: Any) -> Layer | None:
    """Return the parts of a layer, weights in place; None if a compiled layer cannot stand in for it."""
    names = LAYERS.get(type(layer).__name__)
    if names is None or _does_more(layer, config):
        return None
    names = names._replace(is_parallel=bool(getattr(layer, "use_parallel_residual", names.is_parallel)))
    norms = [_child(layer, name) for name in names[:4]]
    attention, mlp = _attention(layer.self_attn, names, config), _mlp(layer.mlp, names)
    if attention is None or mlp is None or not is_stock(*[own for own in norms if own is not None]):
        return None
    attention_norm, attention_out_norm, mlp_norm, mlp_out_norm = (norm_parts(own, _like(attention.q)) for own in norms)
    return Layer(
        attention_norm,
        attention,
        attention_out_norm,
        mlp_norm,
        mlp,
        mlp_out_norm,
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
        parallel=names.is_parallel,
        rope=config.layer_types[layer.self_attn.layer_idx] if rope_kinds(config) else "",
    )


def _attention(module: Any, names: Names, config: Any) -> Attention | None:
    projections = _projections(module, [names.qkv, names.o])
    head_norms = [_child(module, name) for name in (names.q_norm, names.k_norm)]
    if projections is None or not is_stock(module, *[own for own in head_norms if own is not None]):
        return None
    head_dim = int(module.head_dim)
    shared = config.num_key_value_heads * head_dim
    (q, k, v), (o,) = _split(projections[0], [-1, shared, shared]), projections[1]
    q_norm, k_norm = (norm_parts(own, _like(q.weight)) for own in head_norms)
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    # sdpa does not cap scores: newer transformers refuse it for such models, older ones leave the cap out.
    capped = names.is_capped and getattr(config, "_attn_implementation", None) != "sdpa"
    return Attention(
        q.weight,
        k.weight,
        v.weight,
        o.weight,
        q.bias,
        k.bias,
        v.bias,
        o.bias,
        q_norm,
        k_norm,
        head_dim=head_dim,
        scaling=float(module.scaling),
        window=int(window or 0),
        cap=float((module.attn_logit_softcapping if capped else None) or 0.0),
        rotary=bool(getattr(module, "use_rope", True)),
    )


def _mlp(module: Any, names: Names) -> MLP | None:
    activation = ACTIVATIONS.get(type(getattr(module, names.activation, None)).__name__)
    projections = _projections(module, [names.gate_up, names.down])
    if activation is None or projections is None or not is_stock(module):
        return None
    (down,) = projections[1]
    if names.is_gated:
        gate, up = _split(projections[0], [-1, projections[0][0].weight.rows // 2])
    else:
        (up,) = projections[0]
        gate = Projection(some_rows(up.weight, slice(0)), up.bias[:0])
    return MLP(gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias, activation)


def _does_more(layer: Any, config: Any) -> bool:
    """Return True if a layer is told to do more than compiled ones do."""
    attention = layer.self_attn
    more = getattr(attention, "qk_layernorm", False), not getattr(attention, "is_causal", True)
    return any(more) or getattr(config, "clip_qkv", None) is not None


def _child(module: Any, name: str) -> Any:
    return getattr(module, name, None) if name else None


def _projections(module: Any, names: list[str]) -> list[list[Projection]] | None:
    """Return the linear maps of a module by their names, a list for each line of names; None if it has others or more."""
    wanted = [own.split() for own in names]
    linear = {name: own for name, own in module.named_children() if any(True for _ in own.parameters()) and "norm" not in name}
    if set(linear) != {name for own in wanted for name in own}:
        return None
    found = {name: _projection(own) for name, own in linear.items()}
    whole = {name: own for name, own in found.items() if own is not None}
    return [[whole[name] for name in own] for own in wanted] if len(whole) == len(found) else None


def _projection(module: Any) -> Projection | None:
    reader = READERS.get(type(module))
    weight = None if reader is None else reader(module)
    return None if weight is None else Projection(weight, torch.zeros(0) if module.bias is None else module.bias)


def _like(weight: Weight) -> torch.Tensor:
    """Return a tensor without elements, of the dtype and on the device of a weight's numbers."""
    return dense(some_rows(weight, slice(0)))


def _split(projections: list[Projection], sizes: list[int]) -> list[Projection]:
    """Return projections of their own as they are, and one that has all as its rows; the first takes what others leave."""
    if len(projections) == len(sizes):
        return projections
    (whole,) = projections
    ends = list(itertools.accumulate([whole.weight.rows - sum(sizes[1:]), *sizes[1:]]))
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [Projection(some_rows(whole.weight, part), whole.bias[part]) for part in parts]
