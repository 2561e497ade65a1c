"""A KV cache with preallocated space, for generating many texts at once.

Transformers' own dynamic cache copies its whole contents for every new token, into newly allocated memory. Here a layer
has space for a whole text from the start.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

ROOM = 128  # tokens


class RoomyLayer(DynamicLayer):
    """A cache layer whose keys and values are views of the filled part of larger tensors."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._extended("_key_room", self.keys, key_states, held)
        self.values = self._extended("_value_room", self.values, value_states, held)
        return self.keys, self.values

    def _extended(self, name: str, old: torch.Tensor, new: torch.Tensor, held: int) -> torch.Tensor:
        wanted = held + new.shape[-2]
        room = self.__dict__.get(name)
        if room is None or room.shape[-2] < wanted or room.shape[0] != new.shape[0]:
            room = new.new_empty(*new.shape[:2], max(wanted + ROOM, self.room), new.shape[3])
            if held:
                room[:, :, :held] = old
            self.__dict__[name] = room
        room[:, :, held:wanted] = new
        return room[:, :, :wanted]


def roomy_cache(model: PreTrainedModel, room: int) -> DynamicCache:
    """Return the cache the model would make, with plain growing layers replaced by ones with space for `room` tokens."""
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
