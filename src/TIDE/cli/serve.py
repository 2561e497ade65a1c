"""`tide serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated

import typer

from TIDE.cli.errors import WrongUsage
from TIDE.cli.model import load, with_model
from TIDE.cli.router import NoExits, Router, exits_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig
from TIDE.server.settings import ServerSettings

DEFAULTS = ServerSettings()
KEY = "A key that clients must send; may be given several times. Also TIDE_API_KEY, with commas."
Keys = Annotated[list[str] | None, typer.Option("--api-key", metavar="KEY", help=KEY)]


@with_settings(*RUNNING, "cache_gib")
@with_model
def serve(
    model: str = "default",
    *,
    router: Router = None,
    no_exits: NoExits = False,
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0: any.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name that clients ask for; may be given several times.")
    ] = None,
    api_key: Keys = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web pages of this origin may call; may be given several times.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Longest prompt and answer, in tokens; unless given, the model's.")
    ] = None,
    max_rows: Annotated[int, typer.Option(metavar="N", min=1, help="Answers decoded at a time; up to 64.")] = DEFAULTS.max_rows,
    max_queue: Annotated[
        int, typer.Option(metavar="N", min=0, help="Answers that may wait; others get status 429.")
    ] = DEFAULTS.max_queue,
    request_seconds: Annotated[
        float, typer.Option(metavar="NUMBER", min=0.1, help="Time limit of a request.")
    ] = DEFAULTS.request_seconds,
    drain_seconds: Annotated[
        float, typer.Option(metavar="NUMBER", min=0.0, help="Time that answers have to end when the server is stopped.")
    ] = DEFAULTS.drain_seconds,
    salted_keys: Annotated[
        bool, typer.Option("--salted-keys", help="Requests with different API keys share no part of the prefix cache.")
    ] = False,
    vllm_metrics: Annotated[bool, typer.Option("--vllm-metrics", help="Also name metrics as vLLM does.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model of the hub.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
    config: TIDEConfig,
) -> None:
    """Serve a model over HTTP, by OpenAI's API. There is a page to chat on at /; the log is on stderr.

    \b
    Examples:
      tide serve --port 8000
      tide serve my-org/my-model --router my.safetensors --api-key secret
    """
    source = exits_path(model, router, no_exits)
    keys = [*(api_key or ()), *(key for key in os.environ.get("TIDE_API_KEY", "").split(",") if key.strip())]
    try:
        settings = ServerSettings(
            names=tuple(served_model_name or ()) or (model,),
            api_keys=tuple(keys),
            cors_origins=tuple(cors_origin or ()),
            max_model_len=max_model_len,
            max_rows=max_rows,
            max_queue=max_queue,
            request_seconds=request_seconds,
            drain_seconds=drain_seconds,
            vllm_metrics=vllm_metrics,
            salted_keys=salted_keys,
        )
    except ValueError as problem:
        raise WrongUsage(str(problem)) from None
    from TIDE.server import create_app
    from TIDE.server.serve import serve as run

    logging.getLogger("TIDE").setLevel(logging.INFO)
    loaded = load(model, trust_remote_code=trust_remote_code, exits=source)
    app = create_app(loaded, source, config, settings)

    def ready(url: str) -> None:
        typer.echo(json.dumps(dict(url=url, model=settings.names[0])) if as_json else f"{settings.names[0]} is served at {url}")

    run(app, host, port, ready)
