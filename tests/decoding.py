"""Decoding with a look inside afterwards."""

from __future__ import annotations

from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from TIDE import TIDEConfig
from TIDE.adapters.window import Window
from TIDE.engine.batch import Batch
from TIDE.engine.decoder import Decoder
from TIDE.engine.plan import make_plan
from TIDE.engine.sampling import Chooser


def decode(model, policy, ids, new_tokens: int, **config) -> Decoder:
    """Decode greedily and hand back the decoder with its cache."""
    window = Window(model)
    plan = make_plan(TIDEConfig(**config), policy, window)
    batch = Batch(ids, [0] * len(ids), StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + new_tokens)]), None)
    decoder = Decoder(window, plan, policy, batch, Chooser(LogitsProcessorList(), False, batch), capacity=16)
    for _ in decoder.run():
        pass
    window.close()
    return decoder
