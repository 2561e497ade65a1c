"""`tide bench`: speed, latency, memory and energy of `model.generate` and of TIDE on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from TIDE.cli.errors import WrongUsage
from TIDE.cli.files import PromptFile, check_json, write_json
from TIDE.cli.generate import read_prompts
from TIDE.cli.model import MaxNewTokens, ModelOption, load, model_words, say
from TIDE.cli.options import each_of, flag, option
from TIDE.cli.router import NoExits, Router, exits_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig
from TIDE.run import prepared

PROMPTS = [
    "Explain in three sentences how a sailing boat can move against the wind.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The train leaves at nine and arrives before noon.",
]
CONTENDERS = ("generate", "compiled", "early-exit", "lookup", "continuous", "off", "exact", "fast")
ALL = "all"


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
    contender: Annotated[
        list[str] | None,
        option(
            "NAME",
            "generate, compiled, early-exit, lookup, continuous, off, exact, fast, or all; may be repeated. "
            "Unless given: generate, off and the mode.",
            check=each_of(CONTENDERS, ALL),
        ),
    ] = None,
    rows: Annotated[int, option("N", "Prompts continued together.", min=1)] = 1,
    max_new_tokens: MaxNewTokens = 64,
    rounds: Annotated[int, option("N", "Timed runs per prompt.", min=1)] = 3,
    output: Annotated[Path | None, option("FILE", "Keep the results, as JSON.", "--output", "-o", check=check_json)] = None,
    as_json: Annotated[bool, flag("--json", "Print the results as JSON.")] = False,
    config: TIDEConfig,
) -> None:
    """Time model.generate, its rivals and TIDE. The runs are interleaved, on the same prompts; layers that run are counted.

    \b
    Examples:
      tide bench
      tide bench --contender all -o bench.json
      tide bench --file questions.txt --rows 8 --max-new-tokens 128 --rounds 5
      tide bench --model my-org/my-model --router my.safetensors
      tide bench --model my-org/my-model --no-exits
    """
    asked = read_prompts(prompts or [], file) if prompts or file is not None else PROMPTS
    source = exits_path(model, router, no_exits)
    mode = "off" if no_exits else config.effective_mode
    names = _names(contender, mode)
    say(f"loading {model_words(model)}, to measure {', '.join(names)}")

    import TIDE
    from TIDE.bench.benchmark import Benchmark
    from TIDE.evals.machine import circumstances

    facts = circumstances()
    loaded = load(model, exits=source)
    ids = [prepared(loaded.tokenizer, prompt)["input_ids"][0].tolist() for prompt in asked]
    with TIDE.TIDE(loaded.model, source, config) as engine:
        facts |= {"model": model, "mode": mode, "backend": engine.backend, "dtype": str(loaded.model.dtype)}

        def keep(results: Any) -> None:
            if output is not None:
                write_json(output, facts | results.as_dict())

        settings = dict(max_new_tokens=max_new_tokens, rows=rows, rounds=rounds)
        running = Benchmark(engine, ids, names, **settings, after_group=keep, say=say)
        try:
            running.run()
        except KeyboardInterrupt:
            typer.echo(running.results.table())
            raise KeyboardInterrupt("Shown is what was measured so far.") from None
        finally:
            keep(running.results)
    results = running.results
    typer.echo(json.dumps(facts | results.as_dict(), indent=2) if as_json else f"{results.table()}\n{facts['backend']}")
    if wrong := results.wrong_layers:
        raise RuntimeError(f"layers did not run as reported: {', '.join(wrong)}. Do not trust what this engine says of itself.")
    if not results.timed:
        raise RuntimeError(f"nothing was measured: {'; '.join(f'{name}: {why}' for name, why in results.absent.items())}.")


def _names(given: list[str] | None, mode: str) -> list[str]:
    """Return the contenders that are asked for, in their order."""
    if not given:
        return list(dict.fromkeys(["generate", "off", mode]))
    wanted = {*CONTENDERS} if ALL in given else {*given}
    if mode == "off" and ALL not in given and (exits := wanted & {"exact", "fast"}):
        raise WrongUsage(f"expected contenders without exits beside --no-exits, found {', '.join(sorted(exits))}.")
    return [name for name in CONTENDERS if name in wanted]
