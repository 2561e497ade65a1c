"""`tide demo`: one prompt through `model.generate` and TIDE, timed by turns, with the depth of every token."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from TIDE.cli.colours import Pieces, has_colours, legend, painted, show
from TIDE.cli.interleaved import Rounds, interleaved
from TIDE.cli.model import MaxNewTokens, ModelOption, load, model_words, say
from TIDE.cli.options import flag, option
from TIDE.cli.router import Router, router_path
from TIDE.plots.report import check_report, write_report
from TIDE.run import Run, prepared

if TYPE_CHECKING:
    import torch

PROMPT = "Give me five reasons to learn to cook."
NAMES = {"generate": "model.generate", "exits_off": "TIDE, exits off", "exits": "TIDE, exact exits"}
CONTENDERS = {"generate": "generate", "exits_off": "off", "exits": "exact"}  # of tide bench
WARM_UP = 32  # tokens


def demo(
    prompt: Annotated[str, option("TEXT", "Prompt for the model.")] = PROMPT,
    model: ModelOption = "default",
    router: Router = None,
    max_new_tokens: MaxNewTokens = 128,
    rounds: Annotated[int, option("N", "Rounds: timed runs of each contender.", min=1)] = 3,
    output: Annotated[
        Path, option("FILE", "Report: an HTML page with every token.", "--output", "-o", check=check_report)
    ] = Path("tide-demo.html"),
    as_json: Annotated[bool, flag("--json", "Print the results as JSON.")] = False,
) -> None:
    """Compare TIDE with model.generate: the same text, faster. Runs the embedded model unless another is given.

    \b
    Examples:
      tide demo
      tide demo --prompt "Add two numbers in Python." -o sums.html
    """
    source = router_path(model, router) if router is not None or model == "default" else None
    say(f"loading {model_words(model)}")

    import TIDE
    from TIDE.integrations.record import last_run

    loaded = load(model, exits=source)
    inputs = prepared(loaded.tokenizer, prompt).to(loaded.model.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    with TIDE.TIDE(loaded.model, source) as engine:
        timed = _compare(engine, inputs["input_ids"].tolist(), max_new_tokens, rounds)
        answers = {name: timing.ids[0, prompt_tokens:].tolist() for name, timing in timed.kept[-1].items()}
        shown = list(answers)[-1]
        run = last_run(engine, loaded.tokenizer, prompt, inputs["input_ids"], answers[shown])
    write_report(run, output)
    same = {name: timed.is_same(name, "generate") for name in answers if name != "generate"}
    if as_json:
        found = dict(prompt=prompt, model=model, ids=answers[shown], same_text=same, report=str(output))
        typer.echo(json.dumps(found | _speeds(timed)))
    else:
        typer.echo(f"prompt: {prompt}\n")
        plain = loaded.tokenizer.decode(answers["generate"], skip_special_tokens=True)
        coloured = _painted(loaded.tokenizer, answers[shown], run)
        _side_by_side({_title("generate", timed): plain, _title(shown, timed): coloured})
        show(f"\n{legend([token.depth for token in run.tokens], run.num_layers)}\n\n{_table(timed, same)}\n\n{run.summary}\n")
        typer.echo("Measure your own prompts and models with tide bench.")
        typer.echo(f"report: {output} (open it in a browser: router score and the full model's token for every token)")
    raise typer.Exit(0 if all(same.values()) else 1)


def _compare(engine: Any, prompts: list[list[int]], max_new_tokens: int, rounds: int) -> Rounds:
    """Time each contender; leave the median run of the last one as the engine's latest."""
    from TIDE.bench.contenders import groups, make

    (batch,) = groups(prompts, 1, max_new_tokens, engine.model)
    names = [name for name in CONTENDERS if name != "exits" or engine.policy is not None]
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    for name in names:
        say(f"warming up: {NAMES[name]}")
        run = make(CONTENDERS[name], engine, 1).variants[""]
        run(batch.first_row(WARM_UP), None)
        runs[name] = partial(run, batch, None)
    last, notes = names[-1], list[Any]()
    runs[last] = _noting(engine, runs[last], notes)
    timed = interleaved(runs, batch.width, rounds, NAMES, say)
    speeds = timed.speeds(last)
    median = timed.kept[speeds.index(statistics.median_low(speeds))]
    engine.last_rows = next(rows for rows, round_ in zip(notes, timed.timed, strict=True) if round_ is median)
    return timed


def _noting(engine: Any, run: Callable[[], torch.Tensor], notes: list[Any]) -> Callable[[], torch.Tensor]:
    def noted() -> torch.Tensor:
        ids = run()
        notes.append(engine.last_rows)
        return ids

    return noted


def _side_by_side(texts: dict[str, str]) -> None:
    """Print texts that may hold colours, in columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=True, header_style="bold")
    for title in texts:
        columns.add_column(title, ratio=1)
    columns.add_row(*(Text.from_ansi(text) for text in texts.values()))
    coloured = has_colours()
    Console(force_terminal=coloured, color_system="truecolor" if coloured else None).print(columns)


def _title(name: str, timed: Rounds) -> str:
    return f"{NAMES[name]}: {statistics.median(timed.speeds(name)):.1f} tok/s"


def _painted(tokenizer: Any, ids: list[int], run: Run) -> str:
    """Return the text, each token in the colour of its depth."""
    pieces = Pieces(tokenizer)
    return "".join(painted(pieces.add(token), own.depth, run.num_layers) for token, own in zip(ids, run.tokens, strict=True))


def _speeds(timed: Rounds) -> dict[str, Any]:
    """Return all figures of the rounds that count, for JSON."""
    names = list(timed.kept[0])
    return dict(
        tokens_per_second={name: statistics.median(timed.speeds(name)) for name in names},
        rounds={name: timed.speeds(name) for name in names},
        ratio={name: timed.ratio(name, "generate") for name in names[1:]},
        disturbed=timed.notices(NAMES),
    )


def _table(timed: Rounds, same: dict[str, bool]) -> str:
    """Return speeds, ratios and what disturbed them."""
    lines = []
    for name in timed.kept[0]:
        speeds = timed.speeds(name)
        line = f"{NAMES[name]:19}{statistics.median(speeds):6.1f} tok/s  {f'({min(speeds):.1f}-{max(speeds):.1f})':15}"
        if name in same:
            ratio = timed.ratio(name, "generate")
            line += f"{'no ratio' if ratio is None else f'{ratio:.2f}x':10}same text {'yes' if same[name] else 'NO'}"
        lines.append(line.rstrip())
    count = len(timed.kept)
    said = f"medians of {count} rounds (lowest-highest), ratios within a round" if count > 1 else "one round"
    return "\n".join([*lines, said, *timed.notices(NAMES)])
