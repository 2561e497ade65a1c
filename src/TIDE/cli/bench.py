"""`tide bench`: wall-clock speed of `model.generate` and of TIDE on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from TIDE.cli.files import PromptFile
from TIDE.cli.generate import read_prompts
from TIDE.cli.interleaved import contenders, interleaved
from TIDE.cli.model import MaxNewTokens, ModelOption, load
from TIDE.cli.router import NoExits, Router, exits_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig
from TIDE.run import prepared

PROMPTS = [
    "Explain in three sentences how a sailing boat can move against the wind.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The train leaves at nine and arrives before noon.",
]
OURS = ("exits_off", "exits")  # beside model.generate


@with_settings(*RUNNING)
def bench(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; a few built-in ones unless given.")
    ] = None,
    *,
    model: ModelOption = "default",
    file: PromptFile = None,
    router: Router = None,
    no_exits: NoExits = False,
    max_new_tokens: MaxNewTokens = 64,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs per prompt.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    config: TIDEConfig,
) -> None:
    """Time model.generate, TIDE with exits off and TIDE with exits. The runs are interleaved, on the same prompts.

    \b
    Examples:
      tide bench
      tide bench --file questions.txt --max-new-tokens 128 --rounds 5
      tide bench --model my-org/my-model --router my.safetensors
      tide bench --model my-org/my-model --no-exits
    """
    import TIDE

    asked = read_prompts(prompts or [], file) if prompts or file is not None else PROMPTS
    source = exits_path(model, router, no_exits)
    mode = "off" if no_exits else config.effective_mode
    loaded = load(model)
    with TIDE.TIDE(loaded.model, source, config) as engine:
        rows = [_time(engine, prepared(loaded.tokenizer, prompt), max_new_tokens, rounds) for prompt in asked]
        backend = engine.backend
    if as_json:
        results = [dict(row, prompt=prompt) for prompt, row in zip(asked, rows, strict=True)]
        typer.echo(json.dumps(dict(model=model, mode=mode, backend=backend, prompts=results), indent=2))
    else:
        typer.echo(_table(asked, rows, mode) + f"\n{backend}")


def _time(engine: Any, inputs: Any, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the tokens per second of each contender, and whether it generated the same text as `model.generate`."""
    import torch

    inputs = inputs.to(engine.model.device)
    options = dict(inputs, max_new_tokens=max_new_tokens, do_sample=False)

    found = interleaved(contenders(engine, options), inputs["input_ids"].shape[1], rounds)
    same = {f"{name}_same_text": torch.equal(found[name].ids, found["generate"].ids) for name in OURS if name in found}
    return {**{name: timed.speed for name, timed in found.items()}, **same}


def _table(asked: list[str], rows: list[dict[str, Any]], mode: str) -> str:
    names = [name for name in OURS if name in rows[0]]
    titles = "".join(f"{title:>18}" for title in ("exits off", mode)[: len(names)])
    lines = [f"{'tok/s, prompt included':44}{'model.generate':>16}{titles}   same text"]
    for prompt, row in zip(asked, rows, strict=True):
        ours = "".join(f"{row[name]:9.1f} ({row[name] / row['generate']:5.2f}x)" for name in names)
        same = ", ".join("yes" if row[f"{name}_same_text"] else "NO" for name in names)
        lines.append(f"{prompt[:42]:44}{row['generate']:16.1f} {ours}   {same}")
    return "\n".join(lines)
