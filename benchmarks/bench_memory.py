"""Where the memory of an engine and of `tide serve` goes: resident MB after each step.

    python benchmarks/bench_memory.py --chats 30 --together 8

First the steps of a process that makes an engine, then a server of the embedded model: when it is ready, after chats one at a
time, after as many by several clients at once, and after two seconds without a request. "file" is the part that is mapped from
files (weights, libraries), which the system shares between processes and takes back when it has to. Compiled code must be there
already: run `tide generate hi` once before. Linux only. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEPS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from bench_memory import resident
found = {}
import torch
found["import torch"] = resident("self")
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
found["import transformers"] = resident("self")
import TIDE
model, tokenizer = TIDE.load_model("default", device="cpu")
for weight in model.parameters():
    weight.sum()
found["weights"] = resident("self")
engine = TIDE.TIDE(model, TIDE.default_router())
found["engine"] = resident("self")
engine.generate(**tokenizer("Hello there", return_tensors="pt"), max_new_tokens=16)
found["first answer"] = resident("self")
print(json.dumps(found))
"""
IDLE = 2.0  # seconds


def resident(process: int | str) -> tuple[int, int]:
    """Return the resident MB of a process, and how many of them are mapped from files."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    whole, file = (int(lines[name].split()[0]) * 1024 // 10**6 for name in ("VmRSS", "RssFile"))
    return whole, file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=30)
    parser.add_argument("--together", type=int, default=8, help="clients at once")
    args = parser.parse_args()
    steps = [sys.executable, "-c", STEPS, str(Path(__file__).parent)]
    found = json.loads(subprocess.run(steps, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    found |= serve(args.chats, args.together)
    for name, (whole, file) in found.items():
        print(f"{name:32}{whole:6} MB, {file:5} of them from files")
    print(json.dumps(dict(chats=args.chats, together=args.together, megabytes=found)))


def serve(chats: int, together: int) -> dict[str, tuple[int, int]]:
    """Return what a server holds as it goes on."""
    command = [sys.executable, "-m", "TIDE.cli.app", "serve", "default", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            found = {"server, ready": resident(server.pid)}
            for number in range(chats):
                chat(url, number, 1)
            found[f"{chats} chats, one at a time"] = resident(server.pid)
            with ThreadPoolExecutor(together) as clients:
                list(clients.map(lambda number: chat(url, chats + number, 10), range(chats)))
            found[f"{chats} more, {together} at a time"] = resident(server.pid)
            time.sleep(IDLE)
            found["idle"] = resident(server.pid)
        finally:
            server.terminate()
    return found


def chat(url: str, number: int, repeats: int) -> None:
    """Ask for 32 tokens; half of the chats are sampled."""
    question = f"Question {number}: name {number} things that one can cook. " * repeats
    body = dict(model="default", messages=[dict(role="user", content=question)], max_tokens=32, temperature=0.8 * (number % 2))
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        json.load(answer)


if __name__ == "__main__":
    main()
