"""An EAGLE-3 head as other servers load it: a folder with config.json and model.safetensors.

    vllm, sglang    the original layout, in one form that both read. They count layers differently, so depths stand twice:
                    at the top level as vLLM means them, in "eagle_config", one less, as SGLang does
    speculators     names the model it is for, so that vLLM serves the folder by itself

What a layout cannot say is refused with the reason: a head that computes something else is of no use there.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from TIDE.routing.eagle3.head import EagleHead, EagleSizes
from TIDE.routing.eagle3.read import BLOCK, NAMES, UntriedHead
from TIDE.routing.eagle3.servers import READ, TITLES, takes
from TIDE.routing.exits import EAGLE3
from TIDE.routing.fingerprint import Fingerprint
from TIDE.routing.router_file import RouterFile
from TIDE.routing.storage import write_atomically

logger = logging.getLogger(__name__)
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DRAFTS = 3  # in a row, unless the server is told otherwise
SERVERS = {"vllm": "vllm", "sglang": "sglang", "speculators": "vllm"}
OTHER_HEADS = {
    "memory": "a memory head joins the embedding and the memory of a token by a product and keeps both, centred and normed, in "
    "its residual stream; the block of EAGLE-3 reads them side by side and keeps the memory only",
    "lens": "a lens head is a correction of states inside the model, not a draft model before it",
    "identity": "identity exits have no weights of their own",
}


def export(file: RouterFile, folder: str | Path, layout: str = "vllm", model: str | None = None) -> None:
    """Write the EAGLE-3 head of a router file to a folder that other servers load; raise with the reason if it has none.

    Args:
        layout: "vllm", "sglang" or "speculators".
        model: hub id or path of the model, for layouts that name it; None: the hub id in the fingerprint, if it has one.
    """
    folder, where = Path(folder), file.path or "this router file"
    if layout not in SERVERS:
        raise ValueError(f"layout must be one of {list(SERVERS)}, found {layout!r}.")
    if why := _why_not(file, layout) or _why_nameless(file, layout, model):
        raise ValueError(f"{where} cannot be exported for {layout}: {why}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"expected a folder that is new or empty, found {folder}. Give another one.")
    head, made_for = file.exits[0].head, file.fingerprint
    assert isinstance(head, EagleHead) and made_for is not None
    if takes(server := SERVERS[layout], made_for.architecture) is None:
        logger.warning(
            "it is not known here whether %s hands out states of %s for EAGLE-3 heads. If it says that it does not, serve the "
            "model with tide serve.",
            *(TITLES[server], made_for.architecture),
        )
    vocabulary = None if file.vocabulary is None else file.vocabulary.cpu()
    tensors = _tensors(head) | _maps(vocabulary, made_for.vocab_size)
    if layout == "speculators":
        config = _speculators(head, made_for, model)
    else:
        config = _original(head, made_for)
        tensors = {name.replace(BLOCK, "midlayer."): tensor for name, tensor in tensors.items()}
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    write_atomically(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _why_not(file: RouterFile, layout: str) -> str | None:
    """Return what a layout cannot say of a file, and what to do; None: it can say all of it."""
    depths = [depth for depth in file.exits if depth]
    if file.strategy != EAGLE3:
        others = f", and its exits at depths {', '.join(map(str, depths))} are inside the model" if depths else ""
        return f"{OTHER_HEADS[file.strategy]}{others}. Make an EAGLE-3 head: tide calibrate MODEL --strategy eagle3"
    head, made_for = file.exits[0].head, file.fingerprint
    if isinstance(head, UntriedHead) or made_for is None:
        return "its head was not tried on its model, so how it is to be read is open. Give the model too (--model)"
    assert isinstance(head, EagleHead)
    sizes = head.sizes
    server = SERVERS[layout]
    if takes(server, made_for.architecture) is False:
        other = next((f" or use --layout {own}" for own in TITLES if takes(own, made_for.architecture)), "")
        why = f"{TITLES[server]}, as of {READ}, hands out no states of {made_for.architecture} for EAGLE-3 heads"
        return f"{why}. Serve it with tide serve{other}"
    if layout == "sglang" and sizes.norm_before_residual:
        return "SGLang does not know norm_before_residual, with which this head was trained. Use --layout vllm"
    if layout == "sglang" and not (sizes.depths[0] and sizes.depths[-1] < made_for.num_layers):
        return f"SGLang hands out states between layers only, and this head sees those of depths {list(sizes.depths)}"
    return None


def _why_nameless(file: RouterFile, layout: str, model: str | None) -> str | None:
    """Return why a layout that names the model cannot; None: it can, or need not."""
    known = file.fingerprint.name if file.fingerprint else ""
    if layout != "speculators" or model or "/" in known:
        return None
    found = f"the last part of its path, {known!r}" if known else "none"
    return f"there the model is loaded by name, and of that this file has {found}. Give its hub id or path (--model, model=)"


def _tensors(head: EagleHead) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the speculators layout."""
    sizes = head.sizes
    found: dict[str, torch.Tensor] = {}
    rows = {
        "qkv.weight": [count * sizes.head_dim for count in (sizes.heads, sizes.kv_heads, sizes.kv_heads)],
        "gate_up.weight": [sizes.inner_dim] * 2,
    }
    for name, tensor in head.state_dict().items():
        if name == "part_gains":
            found |= {f"fc_norm.{number}.weight": part for number, part in enumerate(tensor)}
        else:
            found |= dict(zip(NAMES[name], tensor.split(rows.get(name, len(tensor))), strict=True))
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in found.items()}


def _maps(vocabulary: torch.Tensor | None, tokens: int) -> dict[str, torch.Tensor]:
    """Return the maps between a draft vocabulary and that of the model; none if they are the same."""
    if vocabulary is None:
        return {}
    chosen = torch.zeros(tokens, dtype=torch.bool)
    chosen[vocabulary] = True
    return {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": chosen}


def _block(head: EagleHead, made_for: Fingerprint) -> dict[str, Any]:
    """Return the configuration of the decoder block."""
    sizes: EagleSizes = head.sizes
    return dict(
        model_type="llama",
        hidden_size=sizes.hidden_dim,
        intermediate_size=sizes.inner_dim,
        num_hidden_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden_act="silu",
        rms_norm_eps=sizes.eps,
        rope_theta=sizes.rope_theta,
        rope_scaling=sizes.rope_scaling or None,
        max_position_embeddings=sizes.context,
        vocab_size=made_for.vocab_size,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        torch_dtype=str(head.fc.weight.dtype).removeprefix("torch."),
    )


def _flags(sizes: EagleSizes) -> dict[str, bool]:
    return {name: True for name in FLAGS if getattr(sizes, name)}


def _original(head: EagleHead, made_for: Fingerprint) -> dict[str, Any]:
    sizes = head.sizes
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | _block(head, made_for) | _flags(sizes)
    config |= {"draft_vocab_size": sizes.vocabulary, LAYER_IDS: list(sizes.depths)}
    if sizes.depths[0]:
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: [depth - 1 for depth in sizes.depths]}
    return config


def _speculators(head: EagleHead, made_for: Fingerprint, model: str | None) -> dict[str, Any]:
    sizes = head.sizes
    proposal = dict(proposal_type="greedy", speculative_tokens=DRAFTS, verifier_accept_k=1, accept_tolerance=0.0)
    return dict(
        architectures=["Eagle3DraftModel"],
        speculators_model_type=EAGLE3,
        transformer_layer_config=_block(head, made_for),
        draft_vocab_size=sizes.vocabulary,
        **{name: getattr(sizes, name) for name in FLAGS},
        **{LAYER_IDS: list(sizes.depths)},
        speculators_config=dict(
            algorithm=EAGLE3,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=dict(name_or_path=model or made_for.name, architectures=[made_for.architecture]),
        ),
    )
