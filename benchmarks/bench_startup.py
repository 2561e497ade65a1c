"""What a first `tide generate` costs: seconds to the first token beyond importing torch and transformers, and where they go.

    python benchmarks/bench_startup.py --rounds 5

New processes, interleaved: one that only imports torch and transformers with the classes a model needs, one that runs `tide
generate` with exits and one without. Then the same steps in one more process, each timed. Compiled code must be there
already: run `tide generate hi` once before. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

IMPORTS = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM; print('x', flush=True)"
GENERATE = ["-m", "TIDE.cli.app", "generate", "Hello there", "--max-new-tokens", "2"]
STEPS = """
import json, sys, time
laps, began = {}, time.perf_counter()
def lap(name):
    global began
    laps[name], began = time.perf_counter() - began, time.perf_counter()
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
lap("import torch and transformers")
import TIDE, TIDE.cli.app, TIDE.engine.engine
from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.select import select_runner
from TIDE.models.default import default_model_path
from TIDE.routing.policies import policy_for
from TIDE.run import prepared
lap("import TIDE")
model = AutoModelForCausalLM.from_pretrained(default_model_path(), dtype=torch.float32).eval()
lap("weights")
tokenizer = AutoTokenizer.from_pretrained(default_model_path())
lap("tokenizer")
file = TIDE.RouterFile.load(TIDE.default_router())
lap("router file")
adapter = ModelAdapter(model)
import TIDE.kernels.cpu.exits
lap("import numba")
runner = select_runner(adapter)
lap("load and check compiled layers")
policy_for(file, adapter, runner.head)
lap("exits in 8 bits")
adapter.close()
engine = TIDE.TIDE(model, TIDE.default_router())
began = time.perf_counter()
next(engine.stream(prepared(tokenizer, "Hello there"), max_new_tokens=2, do_sample=False))
lap("prompt and first token")
print(json.dumps(laps))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways = {"imports": ["-c", IMPORTS], "tide generate": GENERATE, "tide generate --no-exits": [*GENERATE, "--no-exits"]}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, arguments in ways.items():
            found[name].append(first_output(arguments))
    base = statistics.median(found["imports"])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"{name:32}{middle:6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})  beyond imports {middle - base:6.2f} s")
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    steps = json.loads(done.stdout.splitlines()[-1])
    print("\n".join(f"  {name:32}{seconds:6.2f} s" for name, seconds in steps.items()))
    print(json.dumps(dict(rounds=args.rounds, seconds=found, steps=steps)))


def first_output(arguments: list[str]) -> float:
    """Return the seconds until a new process has printed something."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
