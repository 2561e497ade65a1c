"""The first answers on a machine: what `tide generate` takes with empty caches of compiled code, and again, part by part.

    python benchmarks/bench_first_answer.py [--model default] [-o FILE]

Two new processes, one after the other, with caches of their own (Triton's, numba's); then two more that run the same steps,
each timed. The model has to be on the machine: downloads are not counted, but its conversion is. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = """
import json, sys, time
laps, began = {}, time.perf_counter()
def lap(name):
    global began
    laps[name], began = round(time.perf_counter() - began, 2), time.perf_counter()
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
lap("import torch and transformers")
import TIDE, TIDE.engine.engine, TIDE.routing.calibrated
from TIDE.run import prepared
lap("import TIDE")
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    lap("start CUDA")
model, tokenizer = TIDE.load_model(sys.argv[1])
lap("load the model")
engine = TIDE.TIDE(model, TIDE.default_router() if sys.argv[1] == "default" else None)
lap("make the engine")
tokens = engine.stream(**prepared(tokenizer, "Hello").to(model.device), max_new_tokens=32, do_sample=False)
next(tokens)
lap("first token")
next(tokens)
lap("second token")
count = 2 + sum(1 for _ in tokens)
lap("all others")
print(json.dumps(dict(laps, tokens=count, backend=engine.backend)))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="default")
    parser.add_argument("--output", "-o", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with_caches(Path(folder, "whole"))
        whole = [answer(options.model) for _ in range(2)]
        with_caches(Path(folder, "steps"))
        steps = [timed_steps(options.model) for _ in range(2)]
    for name, values in zip(("first", "again"), whole, strict=True):
        print(f"tide generate, {name}: first output after {values[0]:.1f} s, end after {values[1]:.1f} s")
    for name in steps[0]:
        print(f"  {name:30} {steps[0][name]:>8} {steps[1][name]:>8}")
    done = dict(machine=platform.machine(), cores=os.cpu_count(), generate=whole, steps=steps)
    print(json.dumps(done))
    if options.output is not None:
        options.output.write_text(json.dumps(done, indent=1) + "\n")


def with_caches(folder: Path) -> None:
    """Let compilers begin with empty caches."""
    folder.mkdir()
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["NUMBA_CACHE_DIR"] = str(folder / "numba")


def answer(model: str) -> tuple[float, float]:
    """Return the seconds until `tide generate` has written something, and until it has ended."""
    command = [sys.executable, "-m", "TIDE.cli.app", "generate", "Hello", "--max-new-tokens", "32", "--model", model]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - began
        process.stdout.read()
    assert process.returncode == 0
    return round(first, 2), round(time.perf_counter() - began, 2)


def timed_steps(model: str) -> dict[str, float | str]:
    done = subprocess.run([sys.executable, "-c", STEPS, model], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
