"""An answer of an engine: printed as it is generated, how it ended, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from TIDE.cli.colours import Pieces, legend, painted, show


def write(engine: Any, pieces: Pieces, tokens: Iterator[int], depth: bool, quiet: bool) -> None:
    """Print an answer as it is generated, and collect it in `pieces`."""
    layers = engine.last_stats.num_layers
    try:
        for piece in pieces.of(tokens):
            if not quiet:
                show(painted(piece, _depths(engine, pieces)[-1], layers) if depth and piece else piece, nl=False)
    finally:
        if pieces.ids and not quiet:
            typer.echo()
    if depth:
        show(f"\n{legend(_depths(engine, pieces), layers)}\n{engine.last_stats.summary()}")


def finish_reason(engine: Any, pieces: Pieces) -> str | None:
    """Return "stop" for an answer that ended with an end token or a stop string, "length" for one that a limit cut, and None
    for one that was interrupted."""
    row = engine.last_rows[0]
    if pieces.has_stopped:
        return "stop"
    if not row.finished or len(pieces.ids) < len(row.new_tokens):
        return None
    return "stop" if row.tokens[-1] in row.stop.end_tokens else "length"


def tell_if_cut(reason: str | None, tokens: int, most: int, instead: str) -> None:
    """Say on stderr that the limit of tokens cut an answer. Where the model's context did, the engine has warned."""
    if reason == "length" and tokens >= most:
        typer.echo(f"cut at {tokens} tokens. {instead}", err=True)


def figures(tokens: int, tokens_per_second: float, mean_depth: float | None = None, layers: int = 0) -> str:
    """Return what an answer took, in a short line."""
    depth = "" if mean_depth is None else f", mean depth {mean_depth:.1f} of {layers} layers"
    return f"{tokens} token{'s' * (tokens != 1)}, {tokens_per_second:.1f} tokens/s{depth}"


def record(engine: Any, prompt: str, pieces: Pieces) -> dict[str, Any]:
    stats = engine.last_stats
    return dict(
        prompt=prompt,
        answer=pieces.shown,
        finish_reason=finish_reason(engine, pieces),
        tokens=len(pieces.ids),
        tokens_per_second=stats.tokens_per_second,
        seconds=stats.seconds.whole,
        mean_depth=stats.mean_depth,
        exit_rate=stats.exit_rate,
        drafted=stats.drafted,
        accepted=stats.accepted,
        seed=stats.seed,
        depths=_depths(engine, pieces),
        backend=engine.backend,
    )


def _depths(engine: Any, pieces: Pieces) -> list[int]:
    """Return the depths of an answer's tokens: of those that were read, where a stop string ended it within a round."""
    return [decided.depth for decided in engine.last_rows[0].decided[: len(pieces.ids)]]
