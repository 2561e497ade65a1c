"""`tide export`: an EAGLE-3 head for vLLM, SGLang or speculators."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from TIDE.cli.model import load
from TIDE.cli.options import checked, flag, option
from TIDE.cli.router import check_router, router_path
from TIDE.hub import check_model


def export(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", callback=checked(check_router), help="A router file, or an EAGLE-3 head: a folder or a hub id."
        ),
    ],
    to: Annotated[Path, option("DIR", "The folder to write, new or empty.", "--to")],
    layout: Annotated[Literal["vllm", "sglang", "speculators"], option(None, "The layout to write it in.")] = "vllm",
    model: Annotated[
        str | None,
        option(
            "MODEL",
            "Load this model and try the head on it first: needed for one that comes from elsewhere, and for a model from "
            "a folder in the layout speculators, which names it.",
            check=check_model,
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print what was written as JSON.")] = False,
) -> None:
    """Write an EAGLE-3 head as other servers load it. What a layout cannot say is refused with the reason.

    \b
    Examples:
      tide export my.safetensors --to head
      tide export my-org/my-head --model my-org/my-model --to head
    """
    from TIDE.models.default import default_model_path
    from TIDE.routing.eagle3.export import export as export_head
    from TIDE.routing.source import load_router

    held = load_router(router_path("default", file))
    if model is not None:
        from TIDE.adapters.adapter import ModelAdapter
        from TIDE.routing.policies import check_model as check_made_for
        from TIDE.routing.policies import for_model

        with closing(ModelAdapter(load(model).model)) as adapter:
            held = for_model(held, adapter)
            check_made_for(held, adapter)
    export_head(held, to, layout, str(default_model_path()) if model == "default" else model)
    written = {"folder": str(to), "layout": layout, "files": sorted(path.name for path in to.iterdir())}
    typer.echo(json.dumps(written) if as_json else f"written: {to} ({', '.join(written['files'])})")
