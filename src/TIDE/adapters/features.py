"""What a decoder layer of a Llama-like family is made of, for the fused layer.

The table names the layer classes; what they do differently (biases, fused projections, norms of queries and keys, layer norms
and norms around 1, windows, multipliers) is read from the modules. A layer with anything else (adapters, quantized projections,
biases in the MLP, attention and MLP side by side) has no features and runs as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from TIDE.adapters.weights import is_stock
from TIDE.kernels.layer import GELU, GELU_TANH, SILU, Layer, Norm

LLAMA_LIKE = {
    "GemmaDecoderLayer",
    "GraniteDecoderLayer",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "OlmoDecoderLayer",
    "Phi3DecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "SmolLM3DecoderLayer",
    "StableLmDecoderLayer",
}
ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU_TANH, "GELUActivation": GELU}
AROUND_ONE = {"GemmaRMSNorm"}


def norm_features(norm: Any, like: torch.Tensor) -> Norm:
    """What a norm computes with; dtype and device of weights that it does not have are those of `like`."""
    none, name = torch.zeros(0), type(norm).__name__
    if name == "OlmoLayerNorm":
        return Norm(like.new_ones(norm.normalized_shape), 1e-5, 0.0, True, none)
    if name == "LayerNorm":
        return Norm(norm.weight, norm.eps, 0.0, True, none if norm.bias is None else norm.bias)
    eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)
    return Norm(norm.weight, eps, float(name in AROUND_ONE), False, none)


def layer_features(layer: Any, config: Any) -> Layer | None:
    """Weights, in place, and features of a layer; None where the fused layer cannot stand in for it."""
    if type(layer).__name__ not in LLAMA_LIKE:
        return None
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    norms = [own for own in (layer.input_layernorm, layer.post_attention_layernorm) if own is not None]
    if not is_stock(attention, mlp, *norms):
        return None
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)).__name__)
    projections = [part for own in (attention, mlp) for name, part in own.named_children() if name.endswith("_proj")]
    if activation is None or any(type(part) is not nn.Linear for part in projections):
        return None
    if mlp.down_proj.bias is not None or _does_more(layer, config):
        return None
    q, k, v = _split(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), config)
    gate, up = _split(mlp, "gate_up_proj", ("gate_proj", "up_proj"), config)
    none = torch.zeros(0)
    norm, mlp_norm = (norm_features(own, q[0]) for own in (layer.input_layernorm, layer.post_attention_layernorm))
    window = attention.sliding_window if hasattr(attention, "sliding_window") else getattr(config, "sliding_window", None)
    return Layer(
        input_norm=norm.weight,
        mlp_norm=mlp_norm.weight,
        q=q[0],
        k=k[0],
        v=v[0],
        o=attention.o_proj.weight,
        gate=gate[0],
        up=up[0],
        down=mlp.down_proj.weight,
        q_bias=q[1],
        k_bias=k[1],
        v_bias=v[1],
        o_bias=none if attention.o_proj.bias is None else attention.o_proj.bias,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else none,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else none,
        input_norm_bias=norm.bias,
        mlp_norm_bias=mlp_norm.bias,
        head_dim=int(attention.head_dim),
        eps=norm.eps,
        norm_offset=norm.offset,
        scaling=float(attention.scaling),
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
        window=int(window or 0),
        activation=activation,
        rotary=bool(getattr(attention, "use_rope", True)),
        centred=norm.centred,
    )


def _does_more(layer: Any, config: Any) -> bool:
    """Whether a layer is told to do what the fused one does not."""
    asked = getattr(layer, "use_parallel_residual", False), getattr(layer.self_attn, "qk_layernorm", False)
    return any(asked) or getattr(config, "clip_qkv", None) is not None


def _split(module: Any, joined: str, parts: tuple[str, ...], config: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weight and bias of projections, of their own or as rows of one."""
    none = torch.zeros(0)
    if not hasattr(module, joined):
        own = [getattr(module, name) for name in parts]
        return [(each.weight, none if each.bias is None else each.bias) for each in own]
    whole = getattr(module, joined)
    if len(parts) == 2:
        sizes = [whole.out_features // 2] * 2
    else:
        shared = config.num_key_value_heads * module.head_dim
        sizes = [whole.out_features - 2 * shared, shared, shared]
    biases = [none] * len(parts) if whole.bias is None else whole.bias.split(sizes)
    return list(zip(whole.weight.split(sizes), biases, strict=True))
