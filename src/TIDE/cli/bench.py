"""`tide bench`: what TIDE brings here, by the clock."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from TIDE.cli.files import PromptFile
from TIDE.cli.generate import read_prompts
from TIDE.cli.model import ModelOption, load
from TIDE.cli.router import Router, router_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.cli.turns import by_turns, ways
from TIDE.config import TIDEConfig
from TIDE.run import prepared

PROMPTS = [
    "Explain in three sentences how a sailing boat can move against the wind.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The train leaves at nine and arrives before noon.",
]


@with_settings(*RUNNING)
def bench(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to ask; a few built-in prompts unless given.")] = None,
    *,
    model: ModelOption = "default",
    file: PromptFile = None,
    router: Router = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is timed.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    config: TIDEConfig,
) -> None:
    """Time model.generate, TIDE with exits off and TIDE with exits, by turns on the same prompts.

    tide bench

    tide bench --file questions.txt --max-new-tokens 128 --rounds 5

    tide bench "Why is the sky blue?" --model my-org/my-model --router my.safetensors
    """
    import TIDE

    asked = read_prompts(prompts or [], file) if prompts or file is not None else PROMPTS
    source = router_path(model, router)
    loaded = load(model)
    with TIDE.TIDE(loaded.model, source, config) as engine:
        rows = [_time(engine, prepared(loaded.tokenizer, prompt), max_new_tokens, rounds) for prompt in asked]
        backend = engine.backend
    if as_json:
        results = [dict(row, prompt=prompt) for prompt, row in zip(asked, rows, strict=True)]
        typer.echo(json.dumps(dict(model=model, mode=config.mode, backend=backend, prompts=results), indent=2))
    else:
        typer.echo(_table(asked, rows, config.mode) + f"\n{backend}")


def _time(engine: Any, inputs: Any, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each way, and whether the texts are the same."""
    import torch

    inputs = inputs.to(engine.model.device)
    options = dict(inputs, max_new_tokens=max_new_tokens, do_sample=False)

    found = by_turns(ways(engine, options), inputs["input_ids"].shape[1], rounds)
    same = {f"{name}_same_text": torch.equal(found[name].ids, found["generate"].ids) for name in ("exits_off", "exits")}
    return {**{name: timed.speed for name, timed in found.items()}, **same}


def _table(asked: list[str], rows: list[dict[str, Any]], mode: str) -> str:
    lines = [f"{'tok/s, prompt included':44}{'model.generate':>16}{'exits off':>18}{mode:>18}   same text"]
    for prompt, row in zip(asked, rows, strict=True):
        ours = "".join(f"{row[name]:9.1f} ({row[name] / row['generate']:5.2f}x)" for name in ("exits_off", "exits"))
        same = ", ".join("yes" if row[f"{name}_same_text"] else "NO" for name in ("exits_off", "exits"))
        lines.append(f"{prompt[:42]:44}{row['generate']:16.1f} {ours}   {same}")
    return "\n".join(lines)
