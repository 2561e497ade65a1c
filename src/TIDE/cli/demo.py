"""`tide demo`: a prompt through `model.generate` and through TIDE, timed in one run, and where its tokens were decided."""

from __future__ import annotations

import json
from typing import Any

import typer

from TIDE.cli.colours import Pieces, legend, painted, show
from TIDE.cli.errors import one_line
from TIDE.cli.turns import by_turns, ways
from TIDE.run import prepared

PROMPT = "Give me three short reasons to learn to cook."
NAMES = {"generate": "model.generate", "exits_off": "TIDE, exits off", "exits": "TIDE, exact exits"}


@one_line
def demo(
    prompt: str = typer.Option(PROMPT, help="What to ask the model."),
    model: str = typer.Option("default", help="'default', a hub id, or a local path."),
    max_new_tokens: int = typer.Option(64, min=1, help="Longest answer, in tokens."),
    rounds: int = typer.Option(3, min=1, help="How often each way is timed."),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """Show TIDE at work on the embedded default model: the same text, faster."""
    from transformers.utils.logging import disable_progress_bar

    import TIDE

    disable_progress_bar()
    loaded = TIDE.load_model(model)
    inputs = prepared(loaded.tokenizer, prompt).to(loaded.model.device)
    options = dict(inputs, max_new_tokens=max_new_tokens, do_sample=False)
    router = TIDE.default_router() if model == "default" else None
    with TIDE.TIDE(loaded.model, router) as engine:
        found = _compare(engine, options, inputs["input_ids"].shape[1], router is not None, rounds)
        if as_json:
            typer.echo(json.dumps(dict(prompt=prompt, model=model, **found)))
        else:
            show(f"prompt: {prompt}\n\n{_answer(engine, loaded.tokenizer, found.pop('ids'))}\n\n{_table(found)}")
            typer.echo(engine.last_stats.summary())
            typer.echo("\ndocs/benchmarks.md says what this brings on other prompts and machines.")
    raise typer.Exit(0 if all(found["same_text"].values()) else 1)


def _compare(engine: Any, options: dict[str, Any], prompt_tokens: int, with_exits: bool, rounds: int) -> dict[str, Any]:
    """Tokens per second of each way, and whether they wrote the same."""
    import torch

    runs = ways(engine, options)
    if not with_exits:
        del runs["exits"]
    timed = by_turns(runs, prompt_tokens, rounds)
    last = list(runs)[-1]
    ids = runs[last]()[0, prompt_tokens:].tolist()  # once more, so that what the engine noted last is of these tokens
    same = {name: torch.equal(own.ids, timed["generate"].ids) for name, own in timed.items() if name != "generate"}
    return dict(ids=ids, tokens_per_second={name: own.speed for name, own in timed.items()}, same_text=same)


def _table(found: dict[str, Any]) -> str:
    speeds, same = found["tokens_per_second"], found["same_text"]
    lines = [f"{NAMES['generate']:20}{speeds['generate']:6.1f} tok/s"]
    for name, is_same in same.items():
        ratio = speeds[name] / speeds["generate"]
        lines.append(f"{NAMES[name]:20}{speeds[name]:6.1f} tok/s   ({ratio:.2f}x)   same text {'yes' if is_same else 'NO'}")
    return "\n".join(lines) + "\n"


def _answer(engine: Any, tokenizer: Any, ids: list[int]) -> str:
    """The text, each token in the colour of its depth, and a legend."""
    pieces, layers, decided = Pieces(tokenizer), engine.last_stats.num_layers, engine.last_decided[0]
    text = "".join(painted(pieces.add(token), own.depth, layers) for token, own in zip(ids, decided, strict=True))
    return f"{text}\n\n{legend([own.depth for own in decided], layers)}"
