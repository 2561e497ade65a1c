"""The choice of a runner: the fastest one that can run a model, and in words why not a faster one.

A model is run by compiled layers if there is compiled code for its device and dtype, `adapters/layer_parts.py` describes its
layers, nobody hangs hooks on them, and a check on a few tokens gives the states its own layers give. On a GPU other models run
in CUDA graphs, as modules on a static cache. Everything else runs as it is.

    TIDE_BACKEND=modules|numba|triton     use this runner, or say why it cannot be used
    TIDE_NO_CUDA=1                        modules on a GPU
    TIDE_NO_GRAPHS=1                      no CUDA graphs
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import nn

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.layer_parts import layer_parts
from TIDE.adapters.rotary_table import RotaryTable
from TIDE.adapters.snapshot import ModelSnapshot, has_hooks
from TIDE.adapters.weights import adapter_state, is_quantized
from TIDE.engine.check import TOLERANCE, TOLERANCE_HALF, first_compiled_difference
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.compiled import CompiledRunner
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.engine.runners.numba import NumbaRunner
from TIDE.engine.runners.patience import saying_what_takes_so_long
from TIDE.engine.runners.static_modules import StaticModuleRunner
from TIDE.engine.runners.triton import TritonRunner
from TIDE.kernels.dispatch import cpu_layers, gpu_ops, missing_compiler, why_no_kernels, why_no_product
from TIDE.kernels.layer import Layer
from TIDE.kernels.weights import Weight

logger = logging.getLogger(__name__)
BACKENDS = ("modules", "numba", "triton")


def select_runner(adapter: ModelAdapter) -> Runner:
    """Return the fastest runner for a model.

    On a CPU it is checked at once. On a GPU compiling takes seconds, so it is checked after the first prompt: see `checked`.
    """
    asked = os.environ.get("TIDE_BACKEND") or None
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"TIDE_BACKEND must be one of {', '.join(BACKENDS)}, or unset, found {asked!r}.")
    runner = _fastest(adapter)
    if asked is not None and runner.name != asked:
        raise ValueError(
            f"TIDE_BACKEND={asked} is set, but this {type(adapter.model).__name__} on {adapter.device.type} would run as "
            f"{runner.words}. Unset TIDE_BACKEND, or choose {runner.name}."
        )
    return runner


def _fastest(adapter: ModelAdapter) -> Runner:
    device, dtype = adapter.device, adapter.model.dtype
    reason = why_no_kernels(device, dtype)
    if reason is not None:
        if reason == missing_compiler(device):
            _warn_once(reason)
        return ModuleRunner(adapter, reason)
    on_gpu = device.type == "cuda"
    numba_layers = None if on_gpu else cpu_layers()
    layers = described_layers(adapter)
    if isinstance(layers, list):
        if numba_layers is None:
            return TritonRunner(adapter, layers, *gpu_ops())
        with saying_what_takes_so_long("layers"):
            return checked(NumbaRunner(adapter, layers, numba_layers))
    if on_gpu and not any(map(has_hooks, adapter.model.modules())) and StaticModuleRunner.why_not_for(adapter) is None:
        return StaticModuleRunner(adapter, *gpu_ops())
    runner = ModuleRunner(adapter, layers)
    runner.snapshot = ModelSnapshot(adapter.model)  # hooks and adapters may go
    return runner


def described_layers(adapter: ModelAdapter) -> list[Layer] | str:
    """Return the layers of a model for compiled code, or why there is none for it."""
    model = adapter.model
    if len({weight.device for weight in model.parameters()}) > 1:
        return "the model is spread over several devices"
    if any(map(has_hooks, _modules_to_replace(adapter))):
        return "there are hooks on its modules, which compiled layers would not call"
    if is_quantized(model):
        return "its weights are quantized"
    if any(adapter_state(module) for layer in adapter.layers for module in layer.modules()):
        return "there are adapters (PEFT) on its layers"
    config = model.config.get_text_config(decoder=True)
    found = [layer_parts(layer, config) for layer in adapter.layers]
    described = [layer for layer in found if layer is not None]
    rotates = RotaryTable(model).exists
    if len(described) < len(found) or not rotates or not all(_plain(own, model.dtype, adapter.device) for own in described):
        kinds = sorted({type(layer).__name__ for layer in adapter.layers})
        return f"there is no compiled layer for {', '.join(kinds)} as it is here"
    return why_no_product(described, adapter.device) or described


def checked(runner: Runner) -> Runner:
    """Return a runner that is used from now on: this one, if it gives what the model gives, or the model's modules."""
    runner.is_checked = True
    try:
        wrong = _wrong_with(runner)
    except Exception as problem:  # compilers refuse cards, dtypes and sizes in many ways
        wrong = f"{type(problem).__name__}: {problem}"
    if wrong is None:
        if isinstance(runner, CompiledRunner):
            runner.take_short_cuts()
        return runner
    logger.warning("%s runs as it is, without compiled layers or graphs: %s", type(runner.adapter.model).__name__, wrong)
    other = ModuleRunner(runner.adapter, wrong)
    other.snapshot = runner.snapshot
    return other


def _wrong_with(runner: Runner) -> str | None:
    if isinstance(runner, StaticModuleRunner):
        share, allowed = runner.difference(), TOLERANCE.get(runner.adapter.model.dtype, TOLERANCE_HALF)
        return None if share <= allowed else f"with a static cache its states are {share:.1%} off."
    layer = first_compiled_difference(runner)
    if layer is None:
        return None
    name = type(runner.adapter.layers[layer]).__name__
    return f"the compiled layer gives other states than layer {layer} ({name}). Please report the model."


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("no compiled layers: %s", reason)


def _modules_to_replace(adapter: ModelAdapter) -> list[nn.Module]:
    """Return the modules that compiled code stands in for."""
    model = adapter.model
    around = [model.get_input_embeddings(), model.get_output_embeddings(), getattr(model.get_decoder(), "norm", None)]
    tops = [module for module in (*around, *adapter.layers) if module is not None]
    return [module for top in tops for module in top.modules()]


def _plain(part: Any, dtype: torch.dtype | None, device: torch.device) -> bool:
    """Return True if all arrays of a part are what kernels read, and its numbers have a dtype; None: any."""
    if isinstance(part, Weight):
        return part.dtype == dtype and all(_plain(own, None, device) for own in part)
    if isinstance(part, tuple):
        return all(_plain(own, dtype, device) for own in part)
    if not isinstance(part, torch.Tensor) or not len(part):
        return True
    kinds = torch.Tensor, nn.Parameter  # not the tensors of quantization
    return type(part) in kinds and part.dtype == (dtype or part.dtype) and part.device == device and part.is_contiguous()
