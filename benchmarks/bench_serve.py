"""Load on servers, side by side: guidellm's clients against `tide serve` and `transformers serve`, with the same prompts.

    python benchmarks/bench_serve.py --guidellm ENV/bin/guidellm --prompts questions.jsonl

guidellm lives in an environment of its own. The servers run at the same time, and each level of clients is tried on all of them
in turn, so that what else the machine does falls on all. Answers are greedy and end where the model ends them. Questions are
Spec-Bench's lines, or any with `turns` or `prompt`; each level has others, since servers keep what they have seen.

    transformers                `transformers serve`
    transformers, batching      the same with --continuous-batching
    tide, exits off             `tide serve --no-exits`
    tide                        `tide serve`

Prints tokens per second (all, prompts included), milliseconds per token after the first (decode only) and to the first token
(median and p95), then one JSON line. `transformers serve` refuses fields that load tools send; they are taken out on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from TIDE.models.default import default_model_path

# starts `transformers serve` without the checks that refuse what guidellm sends
TRANSFORMERS = """
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.transformers import main

check = ChatCompletionHandler._validate_request

def without_unknown_fields(self, body):
    body.pop("stream_options", None)
    body["max_tokens"] = body.pop("max_completion_tokens")
    return check(self, body)

ChatCompletionHandler._validate_request = without_unknown_fields
main()
"""


def commands(model: str) -> dict[str, list[str]]:
    """Return the command of each server, but for its port."""
    theirs = [sys.executable, "-c", TRANSFORMERS, "serve", model, "--device", "cpu", "--dtype", "float32"]
    ours = [sys.executable, "-m", "TIDE.cli.app", "serve", model, "--max-queue", "1000"]
    return {
        "transformers": theirs,
        "transformers, batching": [*theirs, "--continuous-batching"],
        "tide, exits off": [*ours, "--no-exits"],
        "tide": [*ours, "--router", "default"],
    }


class Server:
    """A server in a process of its own, until it is closed."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        with log.open("w") as file:
            full = [*command, "--host", "127.0.0.1", "--port", str(port)]
            self.process = subprocess.Popen(full, stdout=file, stderr=file, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        self._wait(log)

    def _wait(self, log: Path) -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.5)
        sys.exit(f"a server did not start. Its log:\n{log.read_text()}")

    def ask(self, text: str, model: str) -> bytes:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_completion_tokens": 8, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.read()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


@dataclass
class Load:
    """What guidellm's clients ask for."""

    guidellm: str
    model: str
    prompts: Path
    tokens: int

    def on(self, url: str, clients: int, count: int) -> dict[str, Any]:
        """Return the figures of so many clients, each asking one question after another."""
        out = self.prompts.with_name("out.json")
        backend = f"kind=openai_http,target={url},model={self.model},request_format=/v1/chat/completions"
        backend += f",max_tokens={self.tokens},extras={json.dumps({'body': {'temperature': 0}})}"
        command = [self.guidellm, "run", "--backend", backend, "--profile", f"kind=concurrent,streams={clients}"]
        command += ["--constraint", f"kind=max_requests,count={count}", "--data", f"kind=json_file,path={self.prompts}"]
        command += ["--tokenizer", f"kind=hf_auto,model={self.model}", "--output", f"kind=json,path={out}", "--disable-console"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode:
            sys.exit(f"guidellm failed:\n{done.stdout}{done.stderr}")
        (found,) = json.loads(out.read_text())["benchmarks"]
        return figures(found["metrics"], found["duration"])


def figures(metrics: dict[str, Any], seconds: float) -> dict[str, Any]:
    first, later = metrics["time_to_first_token_ms"]["successful"], metrics["inter_token_latency_ms"]["successful"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    return {
        "answers": metrics["request_totals"]["successful"],
        "errors": metrics["request_totals"]["errored"],
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "later_token_ms": later["mean"],
        "first_token_ms": first["median"],
        "first_token_ms_p95": first["percentiles"]["p95"],
    }


def questions(file: Path, every: int, first: int) -> str:
    """Return every n-th question from a first one on, as guidellm reads them, a JSON object a line."""
    lines = [json.loads(line) for line in file.read_text().splitlines()][first::every]
    texts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    return "".join(json.dumps({"prompt": text}) + "\n" for text in texts)


def measured(load: Load, servers: dict[str, Server], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Show and yield the figures of every level of clients, server by server."""
    print(f"{'clients':>7}  {'server':<24}{'tok/s':>8}{'ms/token':>10}{'first ms':>10}{'p95':>8}", flush=True)
    for number, (clients, count) in enumerate(zip(asked.clients, asked.requests, strict=True)):
        load.prompts.write_text(questions(asked.prompts, asked.every, number % asked.every))
        for name, server in servers.items():
            found = load.on(server.url, clients, count)
            shown = f"{found['tokens_per_second']:>8.1f}{found['later_token_ms']:>10.1f}"
            shown += f"{found['first_token_ms']:>10.0f}{found['first_token_ms_p95']:>8.0f}"
            print(f"{clients:>7}  {name:<24}{shown}", flush=True)
            yield {"clients": clients, "server": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", required=True, help="its console script")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--every", type=int, default=12, help="take every n-th question")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 12, 16, 20, 20], help="for each number of clients")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--servers", nargs="+", default=list(commands("")))
    asked = parser.parse_args()
    model = str(default_model_path())
    with tempfile.TemporaryDirectory() as name, ExitStack() as until_the_end:
        prompts, servers = Path(name) / "prompts.jsonl", {}
        load = Load(asked.guidellm, model, prompts, asked.new_tokens)
        for number, kind in enumerate(asked.servers):
            servers[kind] = Server(commands(model)[kind], 8400 + number, Path(name) / f"{number}.log")
            until_the_end.callback(servers[kind].close)
            servers[kind].ask("Hello", model)  # some load and compile at the first request
        results = list(measured(load, servers, asked))
    print(json.dumps({"bench": "serve", "new_tokens": asked.new_tokens, "results": results}))


if __name__ == "__main__":
    main()
