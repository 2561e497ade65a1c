"""TIDE: Token-Informed Depth Execution. Easy tokens leave a frozen causal LM early; the rest of it runs later.

    model, tokenizer = TIDE.load_model("default")
    with TIDE.TIDE(model) as engine:
        engine.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=64)

Importing costs nothing: each name brings torch and transformers with it when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TIDE.calibration.analyze import analyze
    from TIDE.calibration.calibrate import calibrate
    from TIDE.calibration.certify import certify
    from TIDE.calibration.tune import tune
    from TIDE.config import TIDEConfig
    from TIDE.engine.engine import TIDE
    from TIDE.integrations.conversation import Conversation
    from TIDE.integrations.huggingface import custom_generate, pipeline
    from TIDE.integrations.record import record
    from TIDE.models.default import default_router
    from TIDE.models.load import load_model
    from TIDE.routing.certificate import Certificate
    from TIDE.routing.policy import Candidates, ExitPolicy
    from TIDE.routing.router_file import RouterFile
    from TIDE.run import Run
    from TIDE.stats import ExitStats
    from TIDE.version import __version__

_HOME = {
    "TIDE": "TIDE.engine.engine",
    "TIDEConfig": "TIDE.config",
    "ExitStats": "TIDE.stats",
    "ExitPolicy": "TIDE.routing.policy",
    "Candidates": "TIDE.routing.policy",
    "RouterFile": "TIDE.routing.router_file",
    "Certificate": "TIDE.routing.certificate",
    "Conversation": "TIDE.integrations.conversation",
    "load_model": "TIDE.models.load",
    "default_router": "TIDE.models.default",
    "calibrate": "TIDE.calibration.calibrate",
    "analyze": "TIDE.calibration.analyze",
    "certify": "TIDE.calibration.certify",
    "tune": "TIDE.calibration.tune",
    "custom_generate": "TIDE.integrations.huggingface",
    "pipeline": "TIDE.integrations.huggingface",
    "record": "TIDE.integrations.record",
    "Run": "TIDE.run",
    "__version__": "TIDE.version",
}

__all__ = [
    "TIDE",
    "Candidates",
    "Certificate",
    "Conversation",
    "ExitPolicy",
    "ExitStats",
    "RouterFile",
    "Run",
    "TIDEConfig",
    "__version__",
    "analyze",
    "calibrate",
    "certify",
    "custom_generate",
    "default_router",
    "load_model",
    "pipeline",
    "record",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'TIDE' has no attribute {name!r}. It has {__all__}.")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
