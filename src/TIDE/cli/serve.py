"""`tide serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated

import typer

from TIDE.cli.errors import WrongUsage
from TIDE.cli.model import load, with_model
from TIDE.cli.options import flag, option
from TIDE.cli.router import NoExits, Router, exits_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig
from TIDE.server.settings import ServerSettings

DEFAULTS = ServerSettings()
KEY = "A key that clients must send; may be given several times. Also TIDE_API_KEY, with commas."
Keys = Annotated[list[str] | None, option("KEY", KEY, "--api-key")]


@with_settings(*RUNNING, "cache_gib")
@with_model
def serve(
    model: str = "default",
    *,
    router: Router = None,
    no_exits: NoExits = False,
    host: Annotated[str, option("NAME", "Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, option("N", "Port to listen on; 0: any.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, option("NAME", "Name that clients ask for; may be given several times.")
    ] = None,
    api_key: Keys = None,
    cors_origin: Annotated[
        list[str] | None, option("ORIGIN", "Web pages of this origin may call; may be given several times.")
    ] = None,
    max_model_len: Annotated[
        int | None, option("N", "Longest prompt and answer, in tokens; unless given, the model's.", min=2)
    ] = None,
    max_rows: Annotated[int, option("N", "Answers decoded at a time; up to 64.", min=1)] = DEFAULTS.max_rows,
    max_queue: Annotated[int, option("N", "Answers that may wait; others get status 429.", min=0)] = DEFAULTS.max_queue,
    request_seconds: Annotated[float, option("NUMBER", "Time limit of a request.", min=0.1)] = DEFAULTS.request_seconds,
    drain_seconds: Annotated[
        float, option("NUMBER", "Time that answers have to end when the server is stopped.", min=0.0)
    ] = DEFAULTS.drain_seconds,
    salted_keys: Annotated[
        bool, flag("--salted-keys", "Requests with different API keys share no part of the prefix cache.")
    ] = False,
    vllm_metrics: Annotated[bool, flag("--vllm-metrics", "Also name metrics as vLLM does.")] = False,
    trust_remote_code: Annotated[bool, flag("--trust-remote-code", "Run code that comes with a model of the hub.")] = False,
    as_json: Annotated[bool, flag("--json", "Print the address as JSON.")] = False,
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
