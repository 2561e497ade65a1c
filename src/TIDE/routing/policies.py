"""Exit policies of router files: a file is compared with the model it is to serve, and its exits become a policy."""

from __future__ import annotations

from TIDE.adapters.adapter import ModelAdapter
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.eagle3.imported import tried
from TIDE.routing.exits import EAGLE3
from TIDE.routing.fingerprint import fingerprint
from TIDE.routing.original import ORIGIN, original_policy
from TIDE.routing.policy import ExitPolicy, Head
from TIDE.routing.router import Router
from TIDE.routing.router_file import RouterFile


def for_model(file: RouterFile, adapter: ModelAdapter) -> RouterFile:
    """Return a file as it is used with an adapter's model: itself, or an imported head after a trial on that model."""
    return tried(file, adapter) if file.strategy == EAGLE3 else file


def policy_for(file: RouterFile, adapter: ModelAdapter, head: Head | None = None) -> ExitPolicy:
    """Return the exit policy of a file for an adapter's model; raise unless the file was made for that model.

    Args:
        head: the final norm and LM head; the adapter's own if None.
    """
    file = for_model(file, adapter)
    check_model(file, adapter)
    policy = _original(file, adapter) if file.facts.get("origin") == ORIGIN else _calibrated(file, adapter, head)
    policy.certificate = file.certificate
    return policy


def _original(file: RouterFile, adapter: ModelAdapter) -> ExitPolicy:
    routers = {depth: at.router for depth, at in file.exits.items() if isinstance(at.router, Router)}
    return original_policy(routers, adapter, file.path or "this router file")


def _calibrated(file: RouterFile, adapter: ModelAdapter, head: Head | None) -> ExitPolicy:
    hidden_dim = file.exits[max(file.exits)].sizes.hidden_dim
    if hidden_dim != adapter.hidden_dim or max(file.exits) >= adapter.num_layers:
        raise ValueError(
            f"{file.path or 'this router file'} was made for another model: it has states of {hidden_dim} and exits at depths "
            f"{list(file.exits)}; this model has states of {adapter.hidden_dim} and {adapter.num_layers} layers. "
            f"Use the file of this model, or calibrate this model: tide calibrate MODEL"
        )
    return CalibratedPolicy(file, adapter, head)


def check_model(file: RouterFile, adapter: ModelAdapter) -> None:
    """Raise if a file names another model than the adapter's as the one it was made for."""
    if file.fingerprint is None:
        return
    found = fingerprint(adapter.model)
    if different := file.fingerprint.mismatch(found):
        raise ValueError(
            f"{file.path or 'this router file'} was made for {file.fingerprint.describe()}; this model is "
            f"{found.describe()}. They differ in {', '.join(different)}. Use the file of this model, or calibrate this "
            f"model: tide calibrate {found.name or 'MODEL'}"
        )
