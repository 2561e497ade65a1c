"""Patches: a module's class is replaced by a subclass that looks the same and calls the adapter before it runs.

Modules, parameters, hooks and names stay as they are. `adapter.py` decides what a patched layer does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class Owner(Protocol):
    """An adapter, as its patches know it."""

    model: Any
    patches: Any

    def intercept(self, index: int | None, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a patched layer, or the LM head (index None), in place of `call(*args, **kwargs)`."""


class Patch:
    """The patch of a module, with a weak reference to its owner: a dropped engine closes."""

    def __init__(self, owner: Owner, index: int | None) -> None:
        self.owner = weakref.ref(owner)
        self._index = index

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self.owner()
        return call(*args, **kwargs) if owner is None else owner.intercept(self._index, call, args, kwargs)


def owner_of(module: nn.Module) -> Any:
    """Return the adapter that has patched a module; None: nobody has, or it was dropped."""
    found = module.__dict__.get("_tide_patch")
    return None if found is None else found.owner()


def patch(module: nn.Module, owner: Owner, index: int | None) -> None:
    """Let `owner` intercept the calls of a module.

    Args:
        index: of the layer; None: the LM head.
    """
    name = type(owner.model).__name__
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
    module.__dict__["_tide_patch"] = Patch(owner, index)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a patched module without its patch."""
    return type(module).__mro__[1]


def unpatch(module: nn.Module) -> None:
    module.__class__ = original_class(module)
    del module.__dict__["_tide_patch"]


class Patches:
    """The patches of a model's layers and LM head. One owner has a model at a time.

    Args:
        is_idle: returns True if another owner may take the model over; None: none may.
    """

    def __init__(self, owner: Owner, is_idle: Callable[[], bool] | None) -> None:
        self._owner = weakref.ref(owner)
        self._is_idle = is_idle
        self._wanted: dict[int | None, nn.Module] = {}
        self._patched: list[nn.Module] = []
        self._before: Patches | None = None  # of the owner that had the model
        self._was_replaced = False
        weakref.finalize(owner, _unpatch_all, self._patched).atexit = False  # when Python ends, nothing is put back

    def put(self, modules: dict[int | None, nn.Module]) -> None:
        """Patch layers by their index, and the LM head (None). An idle engine gives its model up."""
        owner, held = self._owner(), owner_of(modules[0])
        assert owner is not None
        if held is not None and held.patches._is_idle is not None and held.patches._is_idle():
            held.patches.remove()
            held.patches._was_replaced = True
            self._before = held.patches
        self._wanted = modules
        try:
            for index, module in modules.items():
                patch(module, owner, index)
                self._patched.append(module)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Leave the model as it was before."""
        _unpatch_all(self._patched)

    @property
    def are_there(self) -> bool:
        return bool(self._patched)

    def check(self) -> None:
        """Raise an error if they were removed."""
        if self.are_there:
            return
        if self._was_replaced:
            raise RuntimeError(
                "this engine is closed: another one was made for its model. Use that one, or engine.using(config) for other "
                "settings."
            )
        raise RuntimeError("this engine is closed. Make a new one with TIDE.TIDE(model, ...).")

    def keep(self) -> None:
        """Keep a model that was taken over."""
        self._before = None

    def give_back(self) -> None:
        """Let the owner have its model again that it was taken from."""
        self.remove()
        if self._before is not None:
            self._before._was_replaced = False
            self._before.put(self._before._wanted)
            self.keep()


def _unpatch_all(modules: list[nn.Module]) -> None:
    while modules:
        unpatch(modules.pop())


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
