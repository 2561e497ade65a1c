"""`tide generate`: answer prompts, streaming the text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from TIDE.cli.colours import Pieces, legend, painted, show
from TIDE.cli.errors import WrongUsage, checked
from TIDE.cli.files import PromptFile, check_target, decoded
from TIDE.cli.model import MaxNewTokens, ModelOption, load
from TIDE.cli.router import NoExits, Router, exits_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig
from TIDE.run import prepared

SEED = "Seed of sampling. The same seed gives the same text, with exits or without."
Temperature = Annotated[float, typer.Option(metavar="NUMBER", min=0.0, help="Sampling temperature; 0: greedy decoding.")]


def _check_run(path: Path) -> None:
    check_target(path, (".json",))


@with_settings(*RUNNING)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; '-' or none: standard input.")] = None,
    *,
    model: ModelOption = "default",
    file: PromptFile = None,
    router: Router = None,
    no_exits: NoExits = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: Annotated[
        float,
        typer.Option(metavar="SHARE", min=0.0, max=1.0, help="Nucleus sampling: smallest token set with this probability."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help=SEED)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    depth: Annotated[bool, typer.Option("--depth", help="Colour each token by the depth at which it was decided.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=checked(_check_run), help="Save the run for tide report: a .json file; one prompt."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per prompt.")] = False,
    config: TIDEConfig,
) -> None:
    """Answer prompts from arguments, a file or standard input.

    \b
    Examples:
      tide generate "Why is the sky blue?" --depth
      tide generate "Why is the sky blue?" --save run.json
      cat questions.txt | tide generate --max-new-tokens 64 --json
    """
    asked = read_prompts(prompts or [], file)
    if save is not None and len(asked) > 1:
        raise WrongUsage(f"--save keeps one run, found {len(asked)} prompts. Ask one at a time.")
    source = exits_path(model, router, no_exits)
    loaded = load(model, exits=source)

    import TIDE
    from TIDE.integrations.record import last_run

    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, do_sample=temperature > 0)
    if temperature > 0:
        options |= dict(temperature=temperature, top_p=top_p, seed=seed)
    with TIDE.TIDE(loaded.model, source, config) as engine:
        for prompt in asked:
            inputs = prepared(loaded.tokenizer, prompt, raw).to(loaded.model.device)
            pieces = Pieces(loaded.tokenizer)
            write(engine, engine.stream(**inputs, **options), pieces, depth and not as_json, quiet=as_json)
            if as_json:
                typer.echo(json.dumps(record(engine, prompt, pieces.shown)))
            if save is not None:
                last_run(engine, loaded.tokenizer, prompt, inputs["input_ids"], pieces.ids).save(save)
                typer.echo(f"written: {save}", err=True)


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """Return the prompts: from arguments, a file or standard input."""
    if file is not None and given:
        raise WrongUsage("expected prompts as arguments or --file, found both. Leave one out.")
    if file is not None:
        return _from_lines(decoded(file.read_bytes(), str(file)), file.suffix == ".jsonl", str(file))
    if given and given != ["-"]:
        return given
    if not given and sys.stdin.isatty():
        raise WrongUsage('expected a prompt. Give one, such as tide generate "Hello", or --file, or pipe one in.')
    return _from_lines(decoded(sys.stdin.buffer.read(), "standard input"), False, "standard input")


def _from_lines(text: str, is_json: bool, name: str) -> list[str]:
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]  # JSON may hold other line ends
    if not lines:
        raise WrongUsage(f"expected a prompt per line in {name}, found none.")
    if not is_json:
        return lines
    found = [_asked(line) for line in lines]
    if None in found:
        number = found.index(None)
        raise WrongUsage(f"expected an object with 'prompt' or 'turns' a line in {name}, found {lines[number][:60]!r}.")
    return [prompt for prompt in found if prompt is not None]


def _asked(line: str) -> str | None:
    """Return the prompt in a line of JSON, or the first of its turns; None if it has neither."""
    try:
        held = json.loads(line)
    except ValueError:
        return None
    prompt = held.get("prompt") or (held.get("turns") or [None])[0] if isinstance(held, dict) else None
    return prompt if isinstance(prompt, str) else None


def write(engine: Any, tokens: Iterator[int], pieces: Pieces, depth: bool, quiet: bool) -> None:
    """Print an answer as it is generated, and collect it in `pieces`."""
    layers = engine.last_stats.num_layers
    try:
        for number, token in enumerate(tokens):
            piece = pieces.add(token)
            if not quiet:
                show(painted(piece, engine.last_rows[0].decided[number].depth, layers) if depth else piece, nl=False)
    finally:
        if pieces.ids and not quiet:
            typer.echo("\n")
    if depth:
        depths = [decided.depth for decided in engine.last_rows[0].decided]
        show(f"{legend(depths, layers)}\n{engine.last_stats.summary()}\n")


def record(engine: Any, prompt: str, answer: str) -> dict[str, Any]:
    stats = engine.last_stats
    return dict(
        prompt=prompt,
        answer=answer,
        tokens=stats.total_tokens,
        tokens_per_second=stats.tokens_per_second,
        seconds=stats.seconds.whole,
        mean_depth=stats.mean_depth,
        exit_rate=stats.exit_rate,
        drafted=stats.drafted,
        accepted=stats.accepted,
        seed=stats.seed,
        depths=[decided.depth for decided in engine.last_rows[0].decided],
        backend=engine.backend,
    )
