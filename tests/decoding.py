"""Decoding with a look inside afterwards."""

from __future__ import annotations

from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from TIDE import TIDEConfig
from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.batch import Batch
from TIDE.engine.loop import Decoder
from TIDE.engine.plan import make_plan
from TIDE.engine.round.sampler import Sampler


def decode(model, policy, ids, new_tokens: int, **config) -> Decoder:
    """Decode greedily and hand back the decoder with its cache."""
    adapter = ModelAdapter(model)
    plan = make_plan(TIDEConfig(**config), policy, adapter)
    batch = Batch(ids, [0] * len(ids), StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + new_tokens)]), None)
    decoder = Decoder(adapter, plan, policy, batch, Sampler(LogitsProcessorList(), False, batch), capacity=16)
    for _ in decoder.run():
        pass
    adapter.close()
    return decoder
