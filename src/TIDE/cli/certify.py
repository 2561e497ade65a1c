"""`tide certify MODEL`: how low the exit threshold of mode fast may go for a bounded loss, kept in the router file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.errors import one_line
from TIDE.cli.router import Router, router_path


@one_line
def certify(
    model: Annotated[str, typer.Argument(help="'default', a hub id, or a local path.")],
    prompts: Annotated[Path, typer.Option(help="A .jsonl file of held-out prompts.")],
    router: Router = None,
    risk: Annotated[float, typer.Option(help="Mean loss that is acceptable.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="How surely it is not exceeded.")] = 0.95,
    loss: Annotated[str, typer.Option(help="rouge_l or mismatch.")] = "rouge_l",
    new_tokens: Annotated[int, typer.Option(min=1, help="How far each prompt is continued at most.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="So many of the prompts, drawn at random.")] = None,
    kv_cache_strategy: Annotated[str, typer.Option(help="Skipped layers: exact, propagate or zero_pad.")] = "exact",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where the certified file goes; over the router file unless it is shipped."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Test exit thresholds of mode fast on held-out prompts, from the safest on, and keep the last that passes."""
    from transformers.utils.logging import disable_progress_bar

    import TIDE
    from TIDE.calibration.prompts import load_prompts
    from TIDE.routing.router_file import add_certificate
    from TIDE.routing.storage import check_suffix

    disable_progress_bar()
    source = router_path(model, router)
    shipped = source == Path(TIDE.default_router())
    target = output or (None if shipped else source)
    if target is not None:
        check_suffix(target)
    # with a threshold, whichever, nobody asks for a certificate the file may have already
    config = TIDE.TIDEConfig(mode="fast", kv_cache_strategy=kv_cache_strategy, exit_threshold=1.0)
    loaded = TIDE.load_model(model)
    asked = load_prompts(prompts, loaded.tokenizer, limit)
    with TIDE.TIDE(loaded.model, source, config) as engine:
        found = TIDE.certify(engine, asked, risk, confidence, loss=loss, new_tokens=new_tokens)
    if target is not None:
        add_certificate(source, found, target)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.summary())
    typer.echo(
        f"written: {target}" if target else "not written: the shipped file stays as it is. Keep it with -o FILE.", err=True
    )
