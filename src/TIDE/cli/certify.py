"""`tide certify MODEL`: find the lowest exit threshold of mode fast with a bounded loss, and store it in the router file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from TIDE.calibration.bounds import check_enough, check_share
from TIDE.calibration.losses import LOSSES
from TIDE.cli.errors import WrongUsage
from TIDE.cli.files import Prompts, count_prompts
from TIDE.cli.model import MaxNewTokens, load, with_model
from TIDE.cli.options import flag, option
from TIDE.cli.router import Router, check_new_router, router_path
from TIDE.cli.settings import HELP
from TIDE.config import KV_CACHE_STRATEGIES, TIDEConfig


@with_model
def certify(
    model: str,
    prompts: Prompts,
    router: Router = None,
    risk: Annotated[
        float, option("SHARE", "Largest acceptable mean loss, above 0 and below 1.", check=partial(check_share, "risk"))
    ] = 0.05,
    confidence: Annotated[
        float, option("SHARE", "Confidence in that bound, above 0 and below 1.", check=partial(check_share, "confidence"))
    ] = 0.95,
    loss: Annotated[Literal[*LOSSES], option(None, "Loss against the full model's text.")] = "rouge_l",  # type: ignore[valid-type]
    max_new_tokens: MaxNewTokens = 64,
    limit: Annotated[int | None, option("N", "Use N of the prompts, drawn at random.", min=1)] = None,
    kv_cache_strategy: Annotated[
        Literal[KV_CACHE_STRATEGIES],  # type: ignore[valid-type]
        option(None, HELP["kv_cache_strategy"]),
    ] = "exact",
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Output file; unless given, the router file is overwritten, except the shipped one. Needed for a folder or hub id.",
            "--output",
            "-o",
            check=check_new_router,
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the certificate as JSON.")] = False,
) -> None:
    """Find the lowest safe exit threshold of mode fast. Held-out prompts test thresholds, from the safest on.

    \b
    Examples:
      tide certify my-org/my-model --router my.safetensors --prompts prompts.jsonl
      tide certify default --prompts prompts.jsonl --risk 0.1 -o mine.safetensors
    """
    source = router_path(model, router)
    count = count_prompts(prompts)
    try:
        check_enough(count if limit is None else min(count, limit), risk, confidence)
    except ValueError as problem:
        raise WrongUsage(str(problem)) from None

    import TIDE
    from TIDE.calibration.prompts import load_prompts
    from TIDE.routing.router_file import add_certificate

    shipped = source == Path(TIDE.default_router())
    if output is None and not source.is_file():
        raise WrongUsage(f"expected -o FILE to write to: {source} is no router file, so there is none to write over.")
    target = output or (None if shipped else source)
    # an explicit threshold, of any value, overrides a certificate that the file may already have
    config = TIDEConfig(mode="fast", kv_cache_strategy=kv_cache_strategy, exit_threshold=1.0)
    loaded = load(model, exits=source)
    asked = load_prompts(prompts, loaded.tokenizer, limit)
    with TIDE.TIDE(loaded.model, source, config) as engine:
        found = TIDE.certify(engine, asked, risk, confidence, loss=loss, max_new_tokens=max_new_tokens)
        assert engine.file is not None
        held = engine.file
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.summary())
    if target is not None and held.path is not None and held.path.is_file():
        add_certificate(held.path, found, target)
    elif target is not None:  # an EAGLE-3 head, as it was read for this model
        held.certificate = found
        held.save(target)
    typer.echo(
        f"written: {target}" if target else "not written: the shipped file stays as it is. Keep it with -o FILE.", err=True
    )
