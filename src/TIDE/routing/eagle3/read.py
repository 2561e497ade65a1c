"""An EAGLE-3 head out of its files: what the tensors say, and the readings that the configuration leaves open.

Tensors win over the configuration: it is often copied from elsewhere. Three things tensors cannot say, and there servers and
trainers disagree about what the same configuration means, so `resolve.py` tries them on the model's own text:

    depths       the id v of a layer is its input (vLLM: depth v) or its output (SGLang, SpecForge: depth v + 1)
    rope         some trainers used a base of 10,000 whatever the configuration says
    norm_output  the carry from draft to draft is normed or not
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from TIDE.routing.eagle3.files import AGAIN, ORIGINAL, HeadFiles
from TIDE.routing.eagle3.head import EagleHead, EagleSizes, frequencies
from TIDE.routing.storage import shown

BLOCK = "layers.0."
ATTENTION, MLP = BLOCK + "self_attn.", BLOCK + "mlp."
ROPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not change with the text
OLD_THETA = 10000.0
# what an EAGLE-3 head is made of, and the tensors of files that are joined for it, row below row
NAMES = {
    "fc.weight": ("fc.weight",),
    "fc_gain": ("input_norm.weight",),
    "token_gain": (BLOCK + "input_layernorm.weight",),
    "memory_gain": (BLOCK + "hidden_norm.weight",),
    "qkv.weight": (ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight"),
    "o.weight": (ATTENTION + "o_proj.weight",),
    "mlp_gain": (BLOCK + "post_attention_layernorm.weight",),
    "gate_up.weight": (MLP + "gate_proj.weight", MLP + "up_proj.weight"),
    "down.weight": (MLP + "down_proj.weight",),
    "gain": ("norm.weight",),
    "lm_head.weight": ("lm_head.weight",),
}
OPTIONAL = ("fc_gain",)
PART = re.compile(r"fc_norm\.\d+\.weight")  # the gain of one remembered state
MAPS = ("d2t", "t2d")  # between the tokens of the head and those of the model
OTHERS = {*MAPS, "embed_tokens.weight"}
# tensors that say that a head computes something else
FOREIGN = {
    "mask_hidden": "it drafts all tokens at once (P-EAGLE)",
    ".bias": "its products have biases",
    "q_norm.": "it norms queries and keys",
    "k_norm.": "it norms queries and keys",
    "scale": "its weights are quantized",
    "qweight": "its weights are quantized",
    "layers.1.": "it has more than one layer",
}


class UntriedHead(EagleHead):
    """A head as it was read, not tried on a model yet.

    Attributes:
        readings: the ways to read it, the one its configuration says first.
        embedding: of tokens, if the files have it.
        target_vocabulary: number of tokens of the model it was made for; None: not said.
    """

    readings: tuple[EagleSizes, ...]
    embedding: torch.Tensor | None
    target_vocabulary: int | None


class ReadHead(NamedTuple):
    """A head and the token ids it chooses from; None: all."""

    head: UntriedHead
    vocabulary: torch.Tensor | None


def read_head(files: HeadFiles) -> ReadHead:
    """Make sense of files; raise with the reason if they are no EAGLE-3 head that TIDE can run."""
    _check_names(files)
    _check_numbers(files)
    vocabulary = _vocabulary(files)
    sizes = _sizes(files)
    _check_rope(files, sizes)
    with torch.device("meta"):
        head = UntriedHead(sizes)
    weights = {name: _joined(name, files) for name in head.state_dict()}
    if vocabulary is not None:
        vocabulary, order = vocabulary.sort()
        weights["lm_head.weight"] = weights["lm_head.weight"][order]
    for name, wanted in head.state_dict().items():
        if weights[name].shape != wanted.shape:
            raise _damaged(files, f"expected {name} of {tuple(wanted.shape)}, found {tuple(weights[name].shape)}")
    head.load_state_dict(weights, assign=True)
    head.eval().requires_grad_(False)
    head.readings = _readings(files, sizes)
    head.embedding = files.tensors.get("embed_tokens.weight")
    head.target_vocabulary = _target_vocabulary(files)
    return ReadHead(head, vocabulary)


def _damaged(files: HeadFiles, what: str) -> ValueError:
    return ValueError(f"{files.folder} is no EAGLE-3 head that can be used: {shown(what)}. {AGAIN}, or give another head.")


def _refused(files: HeadFiles, why: str) -> ValueError:
    return ValueError(
        f"{files.folder} holds a head that TIDE cannot run: {shown(why)}. Give an EAGLE-3 head of one Llama block."
    )


# ---- tensors ----------------------------------------------------------------------------------------------------------------


def _check_names(files: HeadFiles) -> None:
    tensors = files.tensors
    known = {name for names in NAMES.values() for name in names} | OTHERS
    others = [name for name in tensors if name not in known and not PART.fullmatch(name) and "rotary_emb" not in name]
    for name in others:
        if why := next((why for part, why in FOREIGN.items() if part in name), None):
            raise _refused(files, f"{why} ({name})")
    needed = [name for own, names in NAMES.items() if own not in OPTIONAL for name in names]
    if missing := [name for name in needed if name not in tensors]:
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise _damaged(files, f"it lacks the tensor {missing[0]}{more}")
    if _flag(files, "norm_before_fc") and "input_norm.weight" not in tensors:
        raise _damaged(files, "config.json says norm_before_fc, and it lacks the tensor input_norm.weight")
    if "input_norm.weight" in tensors and "fc_norm.0.weight" in tensors:
        raise _refused(files, "it norms states before fc together (input_norm) and each by itself (fc_norm)")
    if others:
        raise _refused(files, f"it has tensors that no EAGLE-3 head has: {', '.join(sorted(others)[:3])}")


def _check_numbers(files: HeadFiles) -> None:
    for name, tensor in files.tensors.items():
        if "rotary_emb" in name:
            continue
        axes = 1 if name in MAPS or "norm." in name else 2
        if tensor.ndim != axes or not tensor.numel():
            raise _damaged(files, f"expected {name} with numbers along {axes} axes, found {tuple(tensor.shape)}")
        if name in MAPS:
            continue
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise _refused(files, f"expected {name} in fp32, bf16 or fp16, found {tensor.dtype}")
        if not tensor.isfinite().all():
            raise _damaged(files, f"{name} holds weights that are not finite numbers")


def _joined(name: str, files: HeadFiles) -> torch.Tensor:
    if name == "part_gains":
        parts = [files.tensors.get(f"fc_norm.{number}.weight") for number in range(_memories(files))]
        found = [part for part in parts if part is not None]
        there = sum(PART.fullmatch(own) is not None for own in files.tensors)
        if not len(found) == len(parts) == there or len({part.shape for part in found}) > 1:
            raise _damaged(files, f"expected {len(parts)} norms fc_norm of one size before fc, found {there}")
        return torch.stack(found)
    parts_of = [files.tensors[part] for part in NAMES[name]]
    if len({(part.ndim, *part.shape[1:]) for part in parts_of}) > 1:
        raise _damaged(files, f"{', '.join(NAMES[name])} read states of different sizes")
    return torch.cat(parts_of).contiguous()


def _memories(files: HeadFiles) -> int:
    """Return how many states of a token the head remembers."""
    fc = files.tensors["fc.weight"]
    width = files.tensors["norm.weight"].numel()
    if fc.ndim != 2 or fc.shape[0] != width:
        raise _damaged(files, f"expected fc.weight to give states of {width}, found {tuple(fc.shape)}")
    target = files.config.get("target_hidden_size") or width
    if target != width:
        raise _refused(files, f"its states have {width} numbers and those of its model {target}")
    q = files.tensors[ATTENTION + "q_proj.weight"]
    if q.shape[-1] == width:
        raise _refused(
            files, f"its attention reads {width} numbers, as that of EAGLE-1 and 2 does; EAGLE-3's reads {2 * width}"
        )
    if fc.shape[1] % width:
        raise _damaged(files, f"expected fc.weight to read states of {width}, found {tuple(fc.shape)}")
    return fc.shape[1] // width


# ---- the vocabulary ---------------------------------------------------------------------------------------------------------


def _target_vocabulary(files: HeadFiles) -> int | None:
    mask = files.tensors.get("t2d")
    said = files.block.get("vocab_size")
    return len(mask) if mask is not None else said if isinstance(said, int) else None


def _vocabulary(files: HeadFiles) -> torch.Tensor | None:
    """Return the token ids of the rows of the LM head; None: row by row those of the model."""
    rows, offsets, mask = (files.tensors.get(name) for name in ("lm_head.weight", "d2t", "t2d"))
    assert rows is not None
    if offsets is None and mask is None:
        return None
    if offsets is None:
        assert mask is not None
        ids = mask.flatten().nonzero()[:, 0]
    elif offsets.ndim != 1 or offsets.dtype not in (torch.int64, torch.int32, torch.int16):
        raise _damaged(files, f"expected d2t as a list of whole numbers, found {offsets.dtype} of {tuple(offsets.shape)}")
    else:
        ids = offsets.long() + torch.arange(len(offsets))
    if len(ids) != len(rows):
        raise _damaged(files, f"expected a token for each of the {len(rows)} rows of lm_head.weight, found {len(ids)} in d2t")
    most = _target_vocabulary(files) or int(ids.max()) + 1
    if int(ids.min()) < 0 or int(ids.max()) >= most or len(ids.unique()) < len(ids):
        found = f"{int(ids.min())} to {int(ids.max())}"
        raise _damaged(files, f"expected different token ids from 0 to {most - 1} in d2t, found {found}")
    if mask is not None and not (mask.ndim == 1 and torch.equal(mask.bool().nonzero()[:, 0], ids.sort().values)):
        raise _damaged(files, "d2t and t2d name different tokens")
    return ids


# ---- sizes, and readings ----------------------------------------------------------------------------------------------------


def _sizes(files: HeadFiles) -> EagleSizes:
    """Return the sizes by the shapes of tensors, and what else the configuration says."""
    block, tensors = files.block, files.tensors
    memories = _memories(files)
    heads, kv_heads, head_dim = _attention_sizes(files)
    if block.get("hidden_act", "silu") != "silu":
        raise _refused(files, f"the activation of its MLP is {block['hidden_act']!r}, not silu")
    theta, scaling = _rope(files)
    return EagleSizes(
        hidden_dim=tensors["norm.weight"].numel(),
        inner_dim=tensors[MLP + "gate_proj.weight"].shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        memories=memories,
        vocabulary=len(tensors["lm_head.weight"]),
        eps=_positive(files, "rms_norm_eps", block.get("rms_norm_eps"), 1e-6),
        rope_scaling=scaling,
        context=int(_positive(files, "max_position_embeddings", block.get("max_position_embeddings"), 2048)),
        fc_norm=any(name.startswith("fc_norm.") for name in tensors) or bool(_flag(files, "fc_norm")),
        norm_before_fc="input_norm.weight" in tensors,
        norm_before_residual=bool(_flag(files, "norm_before_residual")),
        norm_output=bool(_flag(files, "norm_output")),
    )


def _attention_sizes(files: HeadFiles) -> tuple[int, int, int]:
    """Return heads, those of keys, and their size, from the rows of q and k and the configuration's number of heads."""
    rows, key_rows = (files.tensors[f"{ATTENTION}{part}_proj.weight"].shape[0] for part in "qk")
    heads = files.block.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise _damaged(files, f"expected num_attention_heads in config.json, found {heads!r}")
    size = rows // heads
    if size < 2 or rows % heads or size % 2 or key_rows % size or heads % max(1, key_rows // size):
        raise _damaged(files, f"{heads} heads do not fit queries of {rows} and keys of {key_rows} numbers")
    return heads, key_rows // size, size


def _rope(files: HeadFiles) -> tuple[float, dict[str, Any]]:
    """Return base and scaling of the rotary embedding."""
    block = files.block
    said = dict(block.get("rope_parameters") or {}) or dict(block.get("rope_scaling") or {})
    theta = _positive(files, "rope_theta", said.pop("rope_theta", None) or block.get("rope_theta"), OLD_THETA)
    kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    if kind not in ROPES or any(isinstance(value, dict) for value in said.values()):
        raise _refused(files, f"expected a rotary embedding of the kinds {', '.join(ROPES)}, found {kind!r}")
    if (block.get("partial_rotary_factor") or said.get("partial_rotary_factor") or 1) != 1:
        raise _refused(files, "it rotates only a part of queries and keys")
    return theta, {} if kind == "default" else {"rope_type": kind} | said


def _check_rope(files: HeadFiles, sizes: EagleSizes) -> None:
    try:
        found, factor = frequencies(sizes)
    except Exception as problem:  # transformers reads what the configuration says, and can fail in any way
        what = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        raise _damaged(files, f"the rotary embedding {sizes.rope_scaling} cannot be computed ({what})") from problem
    if not found.isfinite().all() or not math.isfinite(factor):
        raise _damaged(files, f"the rotary embedding {sizes.rope_scaling} has frequencies that are not finite numbers")


def _positive(files: HeadFiles, name: str, said: Any, otherwise: float) -> float:
    """Return a number of the configuration, or another one if it has none."""
    try:
        found = float(otherwise if said is None else said)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found <= 0:
        raise _damaged(files, f"expected a number above 0 as {name} in config.json, found {said!r:.60}")
    return found


def _flag(files: HeadFiles, name: str) -> Any:
    inner = files.config.get("eagle_config") or {}
    return files.config.get(name, inner.get(name))


def _readings(files: HeadFiles, sizes: EagleSizes) -> tuple[EagleSizes, ...]:
    """Return the ways to read the head, the likeliest first."""
    is_original = files.layout == ORIGINAL
    depths = _depth_readings(files, sizes.memories)
    thetas = [sizes.rope_theta, *([OLD_THETA] if is_original and sizes.rope_theta != OLD_THETA else [])]
    outputs = [sizes.norm_output, *([not sizes.norm_output] if is_original else [])]
    residuals = [sizes.norm_before_residual]
    if not is_original and _flag(files, "norm_before_residual") is None:
        residuals.append(not sizes.norm_before_residual)  # its class and vLLM differ about what that means
    return tuple(
        replace(sizes, depths=own, rope_theta=theta, norm_output=output, norm_before_residual=residual)
        for own, theta, output, residual in product(depths, thetas, outputs, residuals)
    )


def _depth_readings(files: HeadFiles, memories: int) -> list[tuple[int, ...]]:
    name = "eagle_aux_hidden_state_layer_ids"
    said, inner = files.config.get(name), (files.config.get("eagle_config") or {}).get(name)
    for ids in (said, inner):
        if ids is not None and not (isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids)):
            raise _damaged(files, f"expected a list of layers as {name}, found {ids!r}")
    if said is None and inner is None:
        if memories != 3:
            raise _damaged(files, f"fc.weight reads {memories} states of a token, and config.json does not name their layers")
        return [()]
    given = sorted(set(said or inner or []))
    if len(given) != memories:
        raise _damaged(files, f"fc.weight reads {memories} states of a token, and config.json names the layers {given}")
    if said is not None:
        return [tuple(given)]
    as_inputs, as_outputs = tuple(given), tuple(one + 1 for one in given)
    return [as_inputs, as_outputs] if given[0] == 2 else [as_outputs, as_inputs]
