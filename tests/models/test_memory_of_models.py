"""What an engine of the embedded model holds: its weights once, and little beside them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CHILD = """
import json, re
from pathlib import Path
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
import numba, TIDE.engine.engine
before = resident()
model, tokenizer = TIDE.load_model("default", device="cpu")
with TIDE.TIDE(model, TIDE.default_router()) as engine:
    engine.generate(**tokenizer("Hello there", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    print(json.dumps([resident() - before, sum(weight.nbytes for weight in model.parameters())]))
"""


@pytest.mark.full
@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_engine_holds_the_weights_once(embedded):
    """Half of the weights' size is left for exits in 8 bits, compiled code and modules that are imported on the way."""
    for _ in range(2):  # a first process may compile, which takes memory of its own
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
        held, weights = json.loads(done.stdout.splitlines()[-1])
        if held < 1.5 * weights:
            return
    pytest.fail(f"{held / 1e6:.0f} MB beside the imports, of which {weights / 1e6:.0f} MB are weights")
