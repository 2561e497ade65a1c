"""`tide eval MODEL`: quality and speed of every mode on the tasks of the lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from TIDE.cli.errors import WrongUsage
from TIDE.cli.files import check_json, write_json
from TIDE.cli.model import load, with_model
from TIDE.cli.options import each_of, flag, option
from TIDE.cli.router import Router, router_path

MODES = ("off", "exact", "fast")
RUN = ("command", "date", "commit", "hardware", "packages")  # of each task: a file may have tasks of several runs


@with_model
def eval(
    model: str,
    tasks: Annotated[str, option("NAME,…", "gsm8k, humaneval, mmlu, wikitext, or stock tasks.")],
    data: Annotated[
        Path | None, option("DIR", "Folder with the questions of local tasks.", exists=True, file_okay=False)
    ] = None,
    router: Router = None,
    mode: Annotated[
        list[str] | None,
        option(
            "MODE",
            "A mode to compare with exits off: exact, fast; off compares nothing. May be repeated; all unless given.",
            check=each_of(MODES),
        ),
    ] = None,
    threshold: Annotated[
        list[float] | None, option("NUMBER", "An exit threshold of mode fast; may be repeated.", min=0, max=1)
    ] = None,
    limit: Annotated[int | None, option("N", "Ask N questions of each task.", min=1)] = None,
    fewshot: Annotated[int | None, option("N", "Examples before each question.", min=0)] = None,
    chat: Annotated[bool, flag("--chat", "Ask stock tasks as user messages.")] = False,
    batch_size: Annotated[int, option("N", "Questions asked together.", min=1)] = 1,
    max_new_tokens: Annotated[
        int | None, option("N", "Longest answer, in tokens; as the task asks unless given.", min=1)
    ] = None,
    execute_code: Annotated[bool, flag("--execute-code", "Run code that the model has written, in a sandbox.")] = False,
    output: Annotated[Path, option("FILE", "Results, as JSON.", "--output", "-o", check=check_json)] = Path("tide-eval.json"),
    as_json: Annotated[bool, flag("--json", "Print the results as JSON.")] = False,
) -> None:
    """Measure quality and speed of every mode on tasks. Modes are interleaved; an interrupted run goes on if repeated.

    \b
    Examples:
      tide eval default --tasks gsm8k,mmlu --data . --limit 50
      tide eval default --tasks humaneval --data . --execute-code --mode exact
      tide eval default --tasks gsm8k --data . --threshold 0.9 --threshold 0.6
      tide eval my-org/my-model --router my.safetensors --tasks arc_easy
    """
    names = list(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    modes, thresholds = list(mode or MODES), list(dict.fromkeys(threshold or []))
    if thresholds and "fast" not in modes:
        raise WrongUsage(f"expected mode fast beside --threshold, found {', '.join(modes)}. Add --mode fast.")
    source = None if {*modes} == {"off"} else router_path(model, router, " Or compare nothing: --mode off.")
    _check(names, data, execute_code, fewshot)

    import TIDE
    from TIDE.evals.contenders import contenders
    from TIDE.evals.evaluation import evaluate
    from TIDE.evals.machine import circumstances
    from TIDE.evals.model import Compared
    from TIDE.evals.tasks import chosen_tasks

    for library in ("lm_eval", "evaluate", "absl"):
        logging.getLogger(library).setLevel(logging.ERROR)
    facts = circumstances()  # now: code may change while it is measured
    chosen = chosen_tasks(names, data, chat, fewshot)
    loaded = load(model, exits=source)
    kept = output.with_suffix(".answers.jsonl")
    with TIDE.TIDE(loaded.model, source) as engine:
        compared = contenders(engine, modes, thresholds)
        settings = _settings(loaded, source, compared, batch_size) | {"max_new_tokens": max_new_tokens}
        earlier = _earlier(output, settings)
        asked = Compared(engine, loaded.tokenizer, compared, _answers(kept, settings), batch_size, max_new_tokens)
        try:
            found = evaluate(asked, chosen, limit)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Answers so far are in {kept}. The same command goes on.") from None
        facts |= {"model": model, "backend": engine.backend, "settings": settings}
    run = {name: facts[name] for name in RUN}
    tasks_now = {one.task: run | one.as_dict() for one in found if one.error is None or one.task not in earlier}
    results = facts | {"tasks": [*(earlier | tasks_now).values()]}
    write_json(output, results)
    typer.echo(json.dumps(results, indent=2) if as_json else "\n\n".join(one.table() for one in found))
    typer.echo(f"written: {output} and {kept}", err=True)
    if failed := [one.task for one in found if one.error is not None]:
        raise RuntimeError(f"not measured: {', '.join(failed)}. What was measured is in {output}.")


def _check(names: list[str], data: Path | None, execute_code: bool, fewshot: int | None) -> None:
    """Refuse what cannot work, before a model is loaded."""
    from TIDE.evals.harness import check_harness
    from TIDE.evals.tasks import check_tasks

    try:
        if not names:
            raise ValueError("expected the name of a task, found none.")
        check_tasks(names, data, execute_code, fewshot)
    except (ValueError, OSError) as problem:
        raise WrongUsage(str(problem)) from None
    check_harness()


def _answers(path: Path, settings: dict[str, Any]) -> Any:
    from TIDE.evals.answers import Answers

    found = Answers(path, settings)
    if len(found):
        typer.echo(f"going on: {len(found)} answers are in {path}", err=True)
    return found


def _earlier(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tasks that a file of results has, by name; raise if they were measured with other settings."""
    from TIDE.evals.answers import difference

    if not path.exists():
        return {}
    try:
        held = json.loads(path.read_text("utf-8"))
        own, run = held["settings"], {name: held[name] for name in RUN}
        tasks = {one["task"]: run | one for one in held["tasks"] if one["error"] is None}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"expected results of tide eval in {path}, found something else. Choose another --output.") from None
    if said := difference(own, json.loads(json.dumps(settings))):
        raise ValueError(
            f"{path} has results of other settings: found {said}. Use the same ones to add to them, or choose another --output."
        )
    return tasks


def _settings(loaded: Any, source: Path | None, compared: list[Any], batch_size: int) -> dict[str, Any]:
    """Return what answers and their times depend on, besides questions."""
    from TIDE.routing.fingerprint import fingerprint
    from TIDE.version import __version__

    return {
        "model": fingerprint(loaded.model, loaded.tokenizer).describe(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "router": None if source is None else _identity(source),
        "compared": [one.name for one in compared],
        "batch_size": batch_size,
        "tide": __version__,
    }


def _identity(source: Path) -> str:
    """Return a hash of a router file, or the name of a folder or hub id."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16] if source.is_file() else str(source)
