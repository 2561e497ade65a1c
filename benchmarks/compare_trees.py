"""Two source trees of TIDE, beside each other: the same requests, in turn, in one process for each tree.

    git worktree add /tmp/before v0.4.0
    python benchmarks/compare_trees.py --before /tmp/before                      random Llama of 8 B on a GPU, tiny on a CPU
    python benchmarks/compare_trees.py --before /tmp/before --prompts question.jsonl   the embedded model, Spec-Bench

Random weights: exits off for --rows rows, and the first token of prompts of --tokens tokens. With --prompts: exits off and
exact on --count prompts alone, spread over the file, and on --together rows. Every request is sent to both trees, the order
turned round each time, and texts are compared. Prints a table (times are medians, of prompts their sums; the ratio is of
speeds: above 1 this tree is faster), then one JSON line. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other tree, with src/ and benchmarks/")
    parser.add_argument("--model", default=None, help="a shape of bench_decode.py; None: llama-8b on a GPU, tiny on a CPU")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 2048], help="of prompts whose first token is timed")
    parser.add_argument("--prompts", type=Path, default=None, help="a .jsonl file with `turns`, for the embedded model")
    parser.add_argument("--count", type=int, default=20, help="prompts of the file")
    parser.add_argument("--together", type=int, default=4, help="rows of one batch of them")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


class Tree:
    """A process that answers requests with the code of one tree."""

    def __init__(self, root: Path, model: str | None, is_default: bool) -> None:
        paths = [str(root / "src"), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        start = f"import runpy; runpy.run_path({str(HERE)!r})['answer_requests']({model!r}, {is_default})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> tuple[float, list[list[int]]]:
        """Return the seconds of a request and its new tokens, row by row."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("answer "):
                seconds, rows = json.loads(line.removeprefix("answer "))
                return seconds, rows
        raise SystemExit("A tree ended before it answered: its error is above.")


def answer_requests(name: str | None, is_default: bool) -> None:
    """Run in a tree's process: read requests from stdin, answer on stdout."""
    import torch

    import TIDE
    from bench_decode import on_gpu, random_model

    router = None
    if is_default:
        model, tokenizer = TIDE.load_model("default", dtype=torch.bfloat16 if on_gpu() else torch.float32)
        router = TIDE.default_router()
    else:
        model, tokenizer = random_model(name or ("llama-8b" if on_gpu() else "tiny"), max_position_embeddings=8192), None
    model.generation_config.eos_token_id = None
    with TIDE.TIDE(model, router) as engine:
        for line in sys.stdin:
            request = json.loads(line)
            if "turns" in request:
                chats = [[{"role": "user", "content": text}] for text in request["turns"]]
                rows = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
            else:
                generator = torch.Generator().manual_seed(request["tokens"])
                shape = (request["rows"], request["tokens"])
                rows = torch.randint(10, model.config.vocab_size, shape, generator=generator).tolist()
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
            options = dict(attention_mask=mask, do_sample=False, pad_token_id=0, cache_salt=uuid.uuid4().hex)
            with engine.using(TIDE.TIDEConfig(), exits=request["exits"]):
                began = time.perf_counter()
                answers = engine.generate(ids, max_new_tokens=request["new"], **options)
                if on_gpu():
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - began
            print("answer", json.dumps([seconds, answers[:, width:].tolist()]), flush=True)


def requests(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the requests of each line of the table."""
    if options.prompts is None:
        new, first = options.new_tokens, dict(rows=1, new=1, exits=False)
        lines = {f"off, {rows} rows": [dict(rows=rows, tokens=128, new=new, exits=False)] for rows in options.rows}
        return lines | {f"first of {tokens}": [dict(first, tokens=tokens)] for tokens in options.tokens}
    turns = [json.loads(line)["turns"][0] for line in options.prompts.read_text("utf-8").splitlines()]
    chosen = turns[:: max(1, len(turns) // options.count)][: options.count]
    batches = {"alone": [[text] for text in chosen], f"{options.together} rows": [chosen[: options.together]]}
    return {
        f"{'exact' if exits else 'off'}, {name}": [dict(turns=texts, new=options.new_tokens, exits=exits) for texts in sets]
        for name, sets in batches.items()
        for exits in (False, True)
    }


def main() -> None:
    options = parsed()
    trees = {
        name: Tree(root, options.model, options.prompts is not None)
        for name, root in (("before", options.before.resolve()), ("now", HERE.parents[1]))
    }
    table, has_other_text = {}, False
    print(f"{'':16}{'before, s':>12}{'now, s':>12}{'ratio':>8}", flush=True)
    for line, asked in requests(options).items():
        totals = dict.fromkeys(trees, 0.0)
        for request in asked:
            for tree in trees.values():  # compiles, captures and learns costs
                for _ in range(2):
                    tree.ask(**request)
            seconds: dict[str, list[float]] = {name: [] for name in trees}
            texts: dict[str, list[list[int]]] = {}
            for round_ in range(options.rounds):
                for name in sorted(trees, reverse=bool(round_ % 2)):
                    taken, texts[name] = trees[name].ask(**request)
                    seconds[name].append(taken)
            has_other_text |= texts["before"] != texts["now"]
            for name in trees:
                totals[name] += statistics.median(seconds[name])
        table[line] = dict(totals, ratio=totals["before"] / totals["now"])
        print(f"{line:16}{totals['before']:12.4f}{totals['now']:12.4f}{table[line]['ratio']:8.3f}", flush=True)
    print(json.dumps(dict(results=table, same_texts=not has_other_text)))
    sys.exit(has_other_text)


if __name__ == "__main__":
    main()
