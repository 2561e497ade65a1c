"""Replicas on Ray Serve: serve run TIDE.server.replicas:app model=default replicas=2

Each replica is a process with a model, an engine and a worker of its own. Ray spreads requests, restarts a replica that died
or whose worker failed, and refuses with status 429 what nobody has room for. Requests with the same `x-session-id` header go
to the same replica while it is there.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from TIDE.server.app import create_app
from TIDE.server.settings import ServerSettings

OWN = ("model", "router", "replicas", "most_replicas", "gpus", "cpus")
NUMBERS = {"int": int, "int | None": int, "float": float}
SWITCHES = {"true": True, "false": False}


class Replica:
    """A model behind Ray's proxy.

    Args:
        router: a router file; "default": the shipped one; None: exits off.
    """

    def __init__(self, model: str, router: str | None, settings: ServerSettings) -> None:
        self.model, self.router, self.settings = model, router, settings

    def __serve_build_asgi_app__(self) -> Any:
        from TIDE.models.default import default_router

        router = default_router() if self.router == "default" else self.router
        self.application = create_app(self.model, router, None, self.settings)
        return self.application

    def check_health(self) -> None:
        """Raise if the worker failed: Ray then starts another replica."""
        problem = self.application.state.service.worker.problem
        if problem is not None:
            raise RuntimeError(f"the worker failed: {problem}")


def app(args: dict[str, str]) -> Any:
    """Return the Ray Serve application.

    Args:
        args: model, router, replicas (and most_replicas, if it may grow), gpus and cpus of each, and fields of
            `ServerSettings`, all as text; names and keys with commas between them.
    """
    given = dict(args)
    settings = _settings(given)
    model, router = given.get("model", "default"), given.get("router")
    replicas, most = int(given.get("replicas", 1)), int(given.get("most_replicas", 0))
    count: dict[str, Any] = dict(num_replicas=replicas)
    if most > replicas:
        growth = dict(min_replicas=replicas, max_replicas=most, target_ongoing_requests=settings.max_rows / 2)
        count = dict(autoscaling_config=growth)
    deployment = serve.deployment(
        name="tide",
        **count,
        max_ongoing_requests=settings.max_rows,
        max_queued_requests=settings.max_queue,
        backpressure_config=dict(status_code=429, retry_after_s=1),
        ray_actor_options=dict(num_gpus=float(given.get("gpus", 0)), num_cpus=float(given.get("cpus", 1))),
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
    )
    return deployment(serve.ingress()(Replica)).bind(model, router, settings)


def _settings(given: dict[str, str]) -> ServerSettings:
    """Return the settings of a server; what is neither theirs nor ours is refused."""
    kinds = {field.name: str(field.type) for field in fields(ServerSettings)}
    if unknown := sorted(set(given) - set(kinds) - set(OWN)):
        raise ValueError(f"there is no argument {unknown[0]!r}. There are {', '.join((*OWN, *kinds))}.")
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name in given:
            found[name] = _read(name, kind, given[name].strip())
    return ServerSettings(**found)


def _read(name: str, kind: str, text: str) -> Any:
    """Return the value of a setting."""
    if kind in NUMBERS:
        return NUMBERS[kind](text)
    if kind != "bool":
        return tuple(part.strip() for part in text.split(","))
    if text.lower() not in SWITCHES:
        raise ValueError(f"{name} must be true or false, found {text!r}.")
    return SWITCHES[text.lower()]
