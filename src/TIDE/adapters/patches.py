"""Patches: a module's class is replaced by a subclass that looks the same and calls the adapter before it runs.

Modules, parameters, hooks and names stay as they are. `adapter.py` decides what a patched layer does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from TIDE.adapters.adapter import ModelAdapter


class LayerPatch:
    """The patch of a layer (or of the LM head, index None), with a weak reference to its adapter: a dropped engine closes."""

    def __init__(self, adapter: ModelAdapter, index: int | None) -> None:
        self._adapter = weakref.ref(adapter)
        self._index = index

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        adapter = self._adapter()
        task = None if adapter is None else adapter._task
        if adapter is None or task is None:
            return call(*args, **kwargs)
        if self._index is None:
            return adapter._head(task, call, args, kwargs)
        return adapter._layer(self._index, task, call, args, kwargs)


def holder_of(module: nn.Module) -> ModelAdapter | None:
    """Return the adapter that has patched a module; None: nobody has, or it was dropped."""
    found = module.__dict__.get("_tide_patch")
    return None if found is None else found._adapter()


def patch(module: nn.Module, adapter: ModelAdapter, index: int | None) -> None:
    name = type(adapter.model).__name__
    if "_tide_patch" in module.__dict__:
        raise RuntimeError(
            f"this {name} already belongs to another TIDE engine, which is at work. Let it finish, or close it "
            f"(engine.close(), or leave its `with` block)."
        )
    try:
        module.__class__ = _patched(type(module))  # type: ignore[arg-type]
    except TypeError as problem:
        raise TypeError(
            f"the {type(module).__name__} of this {name} cannot be wrapped ({problem}). TIDE needs layers that are ordinary "
            f"torch modules: load it unscripted, or quantized by a method that keeps modules."
        ) from problem
    module.__dict__["_tide_patch"] = LayerPatch(adapter, index)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a patched module without its patch."""
    return type(module).__mro__[1]


def unpatch(module: nn.Module) -> None:
    module.__class__ = original_class(module)
    del module.__dict__["_tide_patch"]


@functools.cache
def _patched(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cls` that looks the same and calls the patch before it runs."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_tide_patch"](functools.partial(cls.__call__, self), args, kwargs)

    def __reduce__(self: nn.Module) -> tuple[Any, ...]:
        """Make copies and pickles without the patch."""
        return object.__new__, (cls,), {key: value for key, value in self.__dict__.items() if key != "_tide_patch"}

    look_alike = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {"__call__": __call__, "__reduce__": __reduce__, **look_alike})
