"""Tasks of an evaluation: local ones from a folder of data, and stock ones of the harness, which come from the hub."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from TIDE.evals import data
from TIDE.evals.sandbox import check_sandbox, run_code
from TIDE.hub import hub_trouble

NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")  # the sign of 10-20 is none
CODE_ENDS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```", "\nassert"]


class Local(NamedTuple):
    """A task whose questions are in files.

    Attributes:
        rows: reads the questions of a folder, with a number of examples before each.
        config: of the harness's `ConfigurableTask`.
        chat: asked as a user message, where the tokenizer has a chat template.
        runs_code: runs what the model has written.
    """

    rows: Callable[[Path, int], list[data.Row]]
    config: dict[str, Any]
    chat: bool = False
    runs_code: bool = False
    takes_examples: bool = False


def value_found(doc: data.Row, results: Sequence[str]) -> dict[str, float]:
    """Score an answer by its value: the one after ####, or else the last number."""
    said = data.FINAL.findall(results[0]) or NUMBER.findall(results[0])
    return {"exact_match": float(bool(said) and _number(said[-1]) == _number(doc["value"]))}


def passes_tests(doc: data.Row, results: Sequence[str]) -> dict[str, float]:
    """Score a program by its tests, in the sandbox."""
    program = f"{doc['prompt']}{results[0]}\n\n{doc['test']}\n\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(run_code(program).passed)}


def page_perplexity(doc: data.Row, results: Sequence[float]) -> dict[str, tuple[float, int]]:
    """Return the log-likelihood of a page and its number of words, separated by spaces."""
    return {"word_perplexity": (results[0], len(doc["page"].split()))}


LOCAL = {
    "gsm8k": Local(
        data.gsm8k,
        dict(
            output_type="generate_until",
            doc_to_text="prompt",
            doc_to_target="value",
            process_results=value_found,
            metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)],
            generation_kwargs=dict(until=["Question:"], max_gen_toks=256, do_sample=False),
        ),
        chat=True,
        takes_examples=True,
    ),
    "humaneval": Local(
        data.humaneval,
        dict(
            output_type="generate_until",
            doc_to_text="prompt",
            doc_to_target="test",
            process_results=passes_tests,
            metric_list=[dict(metric="pass@1", aggregation="mean", higher_is_better=True)],
            generation_kwargs=dict(until=CODE_ENDS, max_gen_toks=256, do_sample=False),
        ),
        runs_code=True,
    ),
    "mmlu": Local(
        data.mmlu,
        dict(
            output_type="multiple_choice",
            doc_to_text="prompt",
            doc_to_target="answer",
            doc_to_choice=list(data.LETTERS),
            metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True)],
        ),
        takes_examples=True,
    ),
    "wikitext": Local(
        data.wikitext,
        dict(
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="page",
            process_results=page_perplexity,
            metric_list=[dict(metric="word_perplexity", aggregation="weighted_perplexity", higher_is_better=False)],
        ),
    ),
}


class Chosen(NamedTuple):
    """A task and how it is asked; or why it cannot be loaded."""

    task: Any  # of the harness
    chat: bool = False
    error: str | None = None


def check_tasks(names: Sequence[str], folder: Path | None, execute_code: bool, fewshot: int | None = None) -> None:
    """Raise where a local task cannot be asked, before anything is loaded."""
    local = [] if folder is None else [name for name in names if name in LOCAL]
    for name in local:
        task = LOCAL[name]
        if task.runs_code and not execute_code:
            raise ValueError(f"task {name} runs code that the model has written. Allow it with --execute-code.")
        if fewshot and not task.takes_examples:
            raise ValueError(f"task {name} is asked without examples, found --fewshot {fewshot}. Leave it out.")
        assert folder is not None
        task.rows(folder, fewshot or 0)
    if execute_code and any(LOCAL[name].runs_code for name in local):
        check_sandbox()


def chosen_tasks(
    names: Sequence[str], folder: Path | None, chat: bool = False, fewshot: int | None = None
) -> dict[str, Chosen]:
    """Return tasks by name: from `folder` those that are known there, otherwise the harness's own. One that cannot be loaded
    says why; if none can, that is raised.

    Args:
        chat: ask stock tasks as user messages too.
        fewshot: examples before each question; None: none, or what a stock task has.
    """
    stock = [name for name in names if folder is None or name not in LOCAL]
    loaded = _stock(stock, chat, fewshot) if stock else {}
    found: dict[str, Chosen] = {}
    for name in names:
        if name in stock:
            found |= loaded[name]
        else:
            assert folder is not None
            found[name] = Chosen(_local(name, folder, fewshot or 0), LOCAL[name].chat)
    if all(chosen.error for chosen in found.values()):
        raise RuntimeError(" ".join(str(chosen.error) for chosen in found.values()))
    return found


def _local(name: str, folder: Path, examples: int) -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    local = LOCAL[name]
    rows = Dataset.from_list(data.shuffled(local.rows(folder, examples)))
    config = dict(local.config, task=name, test_split="test", num_fewshot=0, custom_dataset=lambda **_: {"test": rows})
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(seed=0)
    return task


def _stock(names: list[str], chat: bool, fewshot: int | None) -> dict[str, dict[str, Chosen]]:
    """Return the harness's tasks by the name they were asked by: one, or those of a group."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    known = {*manager.all_tasks}
    if unknown := [name for name in names if name not in known]:
        here = f"With --data DIR: {', '.join(LOCAL)}."
        raise ValueError(f"the harness has no task {', '.join(unknown)}. See lm_eval ls tasks for those it has. {here}")
    trouble = hub_trouble()
    found: dict[str, dict[str, Chosen]] = {}
    for name in names:
        try:
            with _offline() if trouble else contextlib.nullcontext():
                tasks: dict[str, Any] = manager.load([name])["tasks"]
        except Exception as problem:  # whatever the data set's library or the task's own code raises
            unreachable = f"its data is on the hub, which cannot be reached ({trouble}), and was not downloaded before"
            why = unreachable if trouble else " ".join(str(problem).split())[:300]
            said = f"cannot load {name}: {why}. Local tasks need no hub: --data DIR with {', '.join(LOCAL)}."
            found[name] = {name: Chosen(None, error=said)}
            continue
        for task in tasks.values():
            if fewshot is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=fewshot or 0)
            task.set_fewshot_seed(seed=0)
        found[name] = {own: Chosen(task, chat) for own, task in tasks.items()}
    return found


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Use earlier downloads only: without a connection, libraries try again for minutes."""
    import datasets
    from huggingface_hub import constants

    held = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = held


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return None
