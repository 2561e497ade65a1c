"""TIDE: Token-Informed Depth Execution. Easy tokens leave a frozen causal LM early; the rest of it runs later."""

from importlib.metadata import PackageNotFoundError, version

from TIDE.config import TIDEConfig
from TIDE.engine.engine import TIDE
from TIDE.models.load import load_model
from TIDE.routing.policy import Candidates, ExitPolicy
from TIDE.stats import ExitStats

try:
    __version__ = version("tide-inference")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"

__all__ = ["TIDE", "Candidates", "ExitPolicy", "ExitStats", "TIDEConfig", "__version__", "load_model"]
