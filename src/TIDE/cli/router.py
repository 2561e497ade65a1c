"""Which router file a command works with."""

from __future__ import annotations

from pathlib import Path


def router_path(model: str, router: str | None) -> Path:
    """The file asked for; the shipped one for "default", and for the default model where none is given."""
    import TIDE

    if router == "default" or (router is None and model == "default"):
        return Path(TIDE.default_router())
    if router is None:
        raise ValueError(f"expected a router file for {model}: give --router FILE, or make one: tide calibrate {model}")
    return Path(router)
