"""EAGLE-3 heads: a reference in plain torch, and folders with random weights in both layouts.

The reference follows the description of EAGLE-3 step by step, for one text at a time, and shares no code with TIDE.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

DIM, INNER, HEADS, KV_HEADS, HEAD_DIM, EPS = 64, 96, 4, 2, 16, 1e-5
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """(tokens, heads, size): the first half of a head turns with the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass
class Reference:
    """An EAGLE-3 head by its tensors, under the names of the speculators layout."""

    tensors: dict[str, torch.Tensor]
    flags: dict[str, bool] = field(default_factory=dict)
    theta: float = 10000.0
    eps: float = EPS
    heads: int = HEADS

    def features(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """(tokens, width) states at each depth -> (tokens, width)."""
        if self.flags.get("fc_norm"):
            parts = [rms(part, self.tensors[f"fc_norm.{i}.weight"], self.eps) for i, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.flags.get("norm_before_fc"):
            joined = rms(joined, self.tensors["input_norm.weight"], self.eps)
        return joined @ self.tensors["fc.weight"].T

    def step(self, embedded: torch.Tensor, h: torch.Tensor, positions: torch.Tensor, seen: tuple) -> tuple:
        """Run new positions on the K/V of those before them; return z and the K/V of all."""
        block = {name.removeprefix("layers.0."): one for name, one in self.tensors.items() if name.startswith("layers.0.")}
        e = rms(embedded, block["input_layernorm.weight"], self.eps)
        normed = rms(h, block["hidden_norm.weight"], self.eps)
        x = torch.cat([e, normed], -1)
        q, k, v = (x @ block[f"self_attn.{part}_proj.weight"].T for part in "qkv")
        size = q.shape[1] // self.heads
        q = rotated(q.view(len(x), -1, size), positions, self.theta)
        k = torch.cat([seen[0], rotated(k.view(len(x), -1, size), positions, self.theta)])
        v = torch.cat([seen[1], v.view(len(x), -1, size)])
        mixed = []
        for number in range(len(x)):
            visible = len(k) - len(x) + number + 1
            row = []
            for head in range(self.heads):
                shared = head // (self.heads // k.shape[1])
                weights = (k[:visible, shared] @ q[number, head] / math.sqrt(size)).softmax(0)
                row.append(weights @ v[:visible, shared])
            mixed.append(torch.cat(row))
        residual = normed if self.flags.get("norm_before_residual") else h
        y = residual + torch.stack(mixed) @ block["self_attn.o_proj.weight"].T
        n = rms(y, block["post_attention_layernorm.weight"], self.eps)
        inner = torch.nn.functional.silu(n @ block["mlp.gate_proj.weight"].T) * (n @ block["mlp.up_proj.weight"].T)
        return y + inner @ block["mlp.down_proj.weight"].T, (k, v)

    def nothing(self) -> tuple:
        keys = self.tensors["layers.0.self_attn.k_proj.weight"].shape[0]
        size = self.tensors["layers.0.self_attn.q_proj.weight"].shape[0] // self.heads
        return torch.zeros(0, keys // size, size), torch.zeros(0, keys // size, size)

    def carry(self, z: torch.Tensor) -> torch.Tensor:
        return rms(z, self.tensors["norm.weight"], self.eps) if self.flags.get("norm_output") else z

    def logits(self, z: torch.Tensor) -> torch.Tensor:
        return rms(z, self.tensors["norm.weight"], self.eps) @ self.tensors["lm_head.weight"].T

    def drafts(self, embedded: torch.Tensor, parts: list[torch.Tensor], known: int, count: int) -> torch.Tensor:
        """Return the (count, vocabulary) logits of drafts, where the features of `known` tokens are there.

        Args:
            embedded: (tokens, width) of the text; the drafted tokens are taken to be its own.
        """
        features = self.features([part[:known] for part in parts])
        positions = torch.arange(known + count)
        z, seen = self.step(embedded[1 : known + 1], features, positions[:known], self.nothing())
        found, carried = [self.logits(z[-1:])], self.carry(z[-1:])
        for drafted in range(1, count):
            at = known + drafted
            z, seen = self.step(embedded[at : at + 1], carried, positions[at - 1 : at], seen)
            found.append(self.logits(z))
            carried = self.carry(z)
        return torch.cat(found)


def tensors_of(
    vocabulary: int = 128, dim: int = DIM, seed: int = 0, memories: int = 3, inner: int = INNER, **flags: bool
) -> dict[str, torch.Tensor]:
    """Random weights under the names of the speculators layout."""
    generator = torch.Generator().manual_seed(seed)
    q, k = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "fc.weight": (dim, memories * dim),
        "layers.0.self_attn.q_proj.weight": (q, 2 * dim),
        "layers.0.self_attn.k_proj.weight": (k, 2 * dim),
        "layers.0.self_attn.v_proj.weight": (k, 2 * dim),
        "layers.0.self_attn.o_proj.weight": (dim, q),
        "layers.0.mlp.gate_proj.weight": (inner, dim),
        "layers.0.mlp.up_proj.weight": (inner, dim),
        "layers.0.mlp.down_proj.weight": (dim, inner),
        "layers.0.hidden_norm.weight": (dim,),
        "layers.0.input_layernorm.weight": (dim,),
        "layers.0.post_attention_layernorm.weight": (dim,),
        "norm.weight": (dim,),
        "lm_head.weight": (vocabulary, dim),
    }
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (dim,) for number in range(memories)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (memories * dim,)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + x / 4 if x.ndim == 1 else x / math.sqrt(x.shape[1]) for name, x in drawn.items()}


def with_vocabulary(tensors: dict[str, torch.Tensor], ids: torch.Tensor, vocabulary: int = 128) -> dict[str, torch.Tensor]:
    """The same with maps for a draft vocabulary, whose ids need not rise."""
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[ids] = True
    return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def original(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names of the original layout."""
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


def config_of(layout: str, vocabulary: int = 128, dim: int = DIM, **more: object) -> dict:
    """A configuration; `more` is added, or taken away where it is None."""
    block = dict(
        model_type="llama",
        hidden_size=dim,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        hidden_act="silu",
        rms_norm_eps=EPS,
        num_hidden_layers=1,
        max_position_embeddings=256,
        rope_theta=10000.0,
        vocab_size=vocabulary,
    )
    if layout == "original":
        made = block | dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=vocabulary)
    else:
        made = dict(
            architectures=["Eagle3DraftModel"],
            speculators_model_type="eagle3",
            transformer_layer_config=block,
            draft_vocab_size=vocabulary,
            norm_before_residual=False,
        )
    return {name: value for name, value in (made | more).items() if value is not None}


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], suffix: str = "safetensors") -> Path:
    """A folder with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if suffix == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def a_head(folder: Path, depths: list[int] | None = None, layout: str = "original", **more: object) -> Path:
    """A folder with a head of random weights for tiny models; `more` are flags of the head."""
    config = config_of(layout, **more, eagle_aux_hidden_state_layer_ids=depths or [1, 2, 4])
    tensors = tensors_of(**{name: bool(more.get(name)) for name in FLAGS})
    return write(folder, config, original(tensors) if layout == "original" else tensors)


def fitted(
    model, depths: tuple[int, ...], steps: int = 60, theta: float = 10000.0, more: torch.Tensor | None = None, **flags: bool
) -> dict[str, torch.Tensor]:
    """Tensors of a head that knows a few hundred tokens of a model's own text by heart: those it will be tried on.

    Args:
        more: (rows, 64) further texts that it knows.
    """
    from TIDE.adapters.adapter import ModelAdapter
    from TIDE.routing.eagle3.export import _tensors
    from TIDE.routing.eagle3.head import EagleHead, EagleSizes
    from TIDE.routing.eagle3.resolve import _own_text, _run

    adapter = ModelAdapter(model)
    with torch.no_grad():
        ids = _own_text(adapter)
        text = _run(adapter, ids if more is None else torch.cat([ids, more]), sorted({0, *depths}))
    vocabulary, layers = adapter.vocab_size, adapter.num_layers
    adapter.close()
    sizes = EagleSizes(DIM, INNER, HEADS, KV_HEADS, HEAD_DIM, theta, len(depths), 1, vocabulary, depths, EPS, **flags)
    torch.manual_seed(0)
    head = EagleHead(sizes)
    optimizer = torch.optim.Adam(head.parameters(), 5e-3)
    states = {depth: own.clone() for depth, own in text.states.items()}
    deep = torch.cat([states[depth] for depth in head.seen(0, layers).memories], -1)
    for _ in range(steps):
        loss = torch.zeros(())
        for step, guesses in enumerate(head.unroll(states[0], deep, 3), 1):
            logits = head.logits(guesses[:, step:])
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), text.choices[:, step:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _tensors(head)


def tried(folder: Path, model):
    """The head of a folder as it is read for a model."""
    from TIDE.adapters.adapter import ModelAdapter
    from TIDE.routing.policies import for_model
    from TIDE.routing.source import load_router

    with closing(ModelAdapter(model)) as adapter:
        return for_model(load_router(folder), adapter)
