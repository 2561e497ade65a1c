"""`tide demo`: the same prompt through `model.generate` and through TIDE, timed in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import torch

PROMPT = "Give me three short reasons to learn to cook."


class Timed(NamedTuple):
    ids: torch.Tensor
    tokens_per_second: float


def demo(
    prompt: str = typer.Option(PROMPT, help="What to ask the model."),
    model: str = typer.Option("default", help="'default', a hub id, or a local path."),
    max_new_tokens: int = typer.Option(64, min=1, help="Longest answer, in tokens."),
) -> None:
    """Show TIDE at work on the embedded default model."""
    from transformers.utils.logging import disable_progress_bar

    import TIDE

    disable_progress_bar()
    loaded = TIDE.load_model(model)
    inputs = chat_inputs(loaded.tokenizer, prompt).to(loaded.model.device)
    length = inputs["input_ids"].shape[1]
    options = dict(inputs, max_new_tokens=max_new_tokens, do_sample=False)

    same = _compare_exits_off(loaded.model, loaded.tokenizer, prompt, options, length)
    if model == "default":
        same &= _show_exits(loaded.model, options, length)
    raise typer.Exit(0 if same else 1)


def _compare_exits_off(model: Any, tokenizer: Any, prompt: str, options: dict[str, Any], length: int) -> bool:
    import torch

    import TIDE

    with TIDE.TIDE(model) as engine:
        plain, ours = _interleaved(lambda: model.generate(**options), lambda: engine.generate(**options), length, rounds=3)
        stats = engine.last_stats
    same = torch.equal(plain.ids, ours.ids)
    ratio = ours.tokens_per_second / plain.tokens_per_second
    typer.echo(f"prompt: {prompt}\n")
    typer.echo(tokenizer.decode(ours.ids[0, length:], skip_special_tokens=True).strip() + "\n")
    typer.echo(f"model.generate      {plain.tokens_per_second:6.1f} tok/s")
    typer.echo(f"TIDE, exits off     {ours.tokens_per_second:6.1f} tok/s   ({ratio:.2f}x)   same text {_yes(same)}")
    typer.echo(f"layers run, prompt included: {stats.layers_run}\n")
    return same


def _show_exits(model: Any, options: dict[str, Any], length: int) -> bool:
    """The same prompt with the exits of the shipped router file, mode exact."""
    import torch

    import TIDE

    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        plain, ours = _interleaved(lambda: model.generate(**options), lambda: engine.generate(**options), length, rounds=2)
        stats = engine.last_stats
    same = torch.equal(plain.ids, ours.ids)
    ratio = ours.tokens_per_second / plain.tokens_per_second
    typer.echo(f"TIDE, exact exits   {ours.tokens_per_second:6.1f} tok/s   ({ratio:.2f}x)   same text {_yes(same)}")
    typer.echo(stats.summary())
    typer.echo("\ndocs/benchmarks.md says what they bring on other prompts and machines.")
    return same


def _yes(same: bool) -> str:
    return "yes" if same else "NO"


def chat_inputs(tokenizer: Any, prompt: str) -> Any:
    """The prompt in the model's chat template, where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _interleaved(
    first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor], prompt_length: int, rounds: int
) -> tuple[Timed, Timed]:
    """Both by turns, after a warm-up each; the best of each, since noise only ever slows down."""
    best = [Timed(first(), 0.0), Timed(second(), 0.0)]
    for _ in range(rounds):
        for index, run in enumerate((first, second)):
            start = time.perf_counter()
            ids = run()
            speed = (ids.shape[1] - prompt_length) / (time.perf_counter() - start)
            if speed > best[index].tokens_per_second:
                best[index] = Timed(ids, speed)
    return best[0], best[1]
