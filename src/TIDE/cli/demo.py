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
    import torch
    from transformers.utils.logging import disable_progress_bar

    import TIDE

    disable_progress_bar()
    loaded = TIDE.load_model(model)
    inputs = chat_inputs(loaded.tokenizer, prompt).to(loaded.model.device)
    length = inputs["input_ids"].shape[1]
    options = dict(inputs, max_new_tokens=max_new_tokens, do_sample=False)

    with TIDE.TIDE(loaded.model) as engine:
        plain, ours = _interleaved(
            lambda: loaded.model.generate(**options), lambda: engine.generate(**options), length, rounds=3
        )
        stats = engine.last_stats
    same = torch.equal(plain.ids, ours.ids)
    typer.echo(f"prompt: {prompt}\n")
    typer.echo(loaded.tokenizer.decode(ours.ids[0, length:], skip_special_tokens=True).strip() + "\n")
    typer.echo(f"model.generate      {plain.tokens_per_second:6.1f} tok/s")
    typer.echo(
        f"TIDE, exits off     {ours.tokens_per_second:6.1f} tok/s   ({ours.tokens_per_second / plain.tokens_per_second:.2f}x)"
    )
    typer.echo(f"same text           {'yes' if same else 'NO'}\n")
    typer.echo(stats.summary())
    typer.echo(f"\nLayers run, prompt included: {stats.layers_run}. No exits yet: a router has to be trained first.")
    raise typer.Exit(0 if same else 1)


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
