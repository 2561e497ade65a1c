"""The heads that training starts from: fresh ones, or those of a file.

    fresh           built for the model, at every candidate checkpoint; their inputs are measured before training
    from a file     a router file of this or a related model, or a published EAGLE-3 head: at the depths it has exits at

A head of a file keeps its strategy, its sizes and, if it has an LM head of its own, its vocabulary; routers, draft length and
draft vocabulary are made anew. The model may be another one of the same sizes, such as a fine-tuned one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.fit import fresh_head
from TIDE.config import TIDEConfig
from TIDE.routing.eagle3.fresh import check_model, fresh_depths, fresh_eagle_head
from TIDE.routing.exits import EAGLE3, Exit
from TIDE.routing.fingerprint import fingerprint
from TIDE.routing.heads import MEMORIES, DraftHead, HeadSizes, MemoryHead, head_sizes, input_depths, memory_depths
from TIDE.routing.policies import for_model
from TIDE.routing.router_file import RouterFile
from TIDE.routing.source import load_router

logger = logging.getLogger(__name__)
OTHERWISE = "Calibrate without it"


class Start:
    """The weights that training starts from.

    Args:
        source: a router file, a folder or a hub id; None: fresh heads.
    """

    def __init__(self, adapter: ModelAdapter, config: TIDEConfig, seed: int, source: str | Path | None) -> None:
        self.adapter = adapter
        self.config = config
        self.seed = seed
        self.source = source
        self.file = None if source is None else _loaded(source, adapter, config)
        self.strategy = config.exit_strategy if self.file is None else self.file.strategy
        self.depths()  # what cannot be done is said before any work
        if self.file is None and self.strategy == EAGLE3:
            check_model(adapter)

    @property
    def has_own_vocabulary(self) -> bool:
        """True if heads have an LM head of their own, for tokens that were chosen with it."""
        return self.strategy == EAGLE3

    @property
    def guesses_states(self) -> bool:
        """True if heads guess states of the model; one from elsewhere, with an LM head of its own, need not."""
        return self.file is None or self.strategy != EAGLE3

    def content(self) -> str:
        """Return a hash of the heads as they begin: what lies at a path may be replaced."""
        exits = {} if self.file is None else self.file.exits
        tensors = {f"{depth}.{name}": own for depth, at in exits.items() for name, own in at.head.state_dict().items()}
        sizes = [[depth, str(at.sizes)] for depth, at in exits.items()]
        bits = save({name: own.detach().cpu().contiguous().clone() for name, own in tensors.items()})
        return hashlib.sha256(json.dumps(sizes).encode() + bits).hexdigest()[:16]

    def depths(self) -> list[int]:
        """Return the candidate checkpoints."""
        layers, least, interval = self.adapter.num_layers, self.config.min_layers or 0, self.config.checkpoint_interval
        first = 0 if self.strategy in ("memory", EAGLE3) else interval
        found = [0] if self.strategy == EAGLE3 else [*range(first, layers, interval)]
        found = [depth for depth in (found if self.file is None else self.file.exits) if depth >= least]
        if found:
            return found
        if self.file is not None or self.strategy == EAGLE3:
            where = "an EAGLE-3 head stands before the first layer" if self.strategy == EAGLE3 else "its exits are shallower"
            raise ValueError(f"no checkpoint is left: {where}, and min_layers is {least}. Lower min_layers.")
        raise ValueError(
            f"no checkpoint is left: every {interval} layers from depth {max(first, least)} on, "
            f"in a model of {layers} layers. Lower min_layers or checkpoint_interval."
        )

    def remembered(self) -> list[int]:
        """Return the depths at which states of all texts are kept: full depth and what heads remember of earlier tokens."""
        layers = self.adapter.num_layers
        found = {layers}
        if self.file is not None:
            heads = {depth: own.head for depth, own in self.file.exits.items()}
            remembering = {depth: head for depth, head in heads.items() if isinstance(head, DraftHead)}
            found |= {one for depth, head in remembering.items() for one in head.seen(depth, layers).memories}
        elif self.strategy == EAGLE3:
            found |= {*fresh_depths(layers)}
        elif self.strategy == "memory":
            found |= {*memory_depths(layers, MEMORIES)}
        return sorted(found)

    def inputs(self, depth: int) -> list[int]:
        """Return the depths at which the head at a checkpoint sees its token."""
        return [0] if self.strategy == EAGLE3 else input_depths(depth, self._sizes(depth).inputs)

    def head(self, depth: int, before: list[Exit], vocabulary: torch.Tensor | None) -> nn.Module:
        """Return a head to train.

        Args:
            before: exits at shallower depths; a fresh memory head starts from the last of them, with more inputs.
            vocabulary: tokens of an LM head of its own.
        """
        if self.file is not None:
            return self.file.exits[depth].head.float()
        if self.strategy == EAGLE3:
            return fresh_eagle_head(self.adapter, vocabulary, self.seed)
        head = fresh_head(self.strategy, self._sizes(depth), self.seed)
        if before and isinstance(head, MemoryHead) and isinstance(before[-1].head, MemoryHead):
            head.begin_as(before[-1].head)
        return head

    def _sizes(self, depth: int) -> HeadSizes:
        return _sizes(self.strategy, self.adapter, depth)


def _loaded(source: str | Path, adapter: ModelAdapter, config: TIDEConfig) -> RouterFile:
    file = load_router(source)
    if why := _why_not(file, adapter, config):
        raise ValueError(f"cannot train on from {source}: {why}.")
    file = for_model(file, adapter)
    if file.fingerprint is not None and (different := file.fingerprint.mismatch(fingerprint(adapter.model))):
        logger.info("%s was made for another model (%s differ): its heads are trained on for this one", source, different)
    return file


def _why_not(file: RouterFile, adapter: ModelAdapter, config: TIDEConfig) -> str | None:
    """Return why a file cannot be trained on from, and what to do; None: it can."""
    strategy, asked = file.strategy, config.exit_strategy
    if strategy == "identity":
        return f"its exits are identity exits, which have no weights to train. {OTHERWISE}"
    if asked not in (strategy, TIDEConfig.exit_strategy):
        return f"it has {strategy} heads and exit_strategy is {asked!r}. Leave exit_strategy out"
    made_for = file.fingerprint
    if made_for is not None and made_for.num_layers != adapter.num_layers:
        return f"it was made for {made_for.num_layers} layers and this model has {adapter.num_layers}. {OTHERWISE}"
    if strategy == EAGLE3:
        return None  # compared with the model when it is tried
    for depth, own in file.exits.items():
        if own.sizes != (wanted := _sizes(strategy, adapter, depth)):
            return f"its head at depth {depth} has the sizes {own.sizes} and one of this model {wanted}. {OTHERWISE}"
    return None


def _sizes(strategy: str, adapter: ModelAdapter, depth: int) -> HeadSizes:
    return head_sizes(strategy, adapter.model.config.get_text_config(decoder=True), adapter.hidden_dim, depth)
