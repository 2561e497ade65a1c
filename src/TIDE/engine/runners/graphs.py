"""CUDA graphs: work on fixed addresses, captured the second time it is asked for and replayed from then on.

The first time everything runs as it is written, which also compiles what has to be compiled. Where a capture fails, the work
goes on without graphs; the reason is logged once and kept. `TIDE_NO_GRAPHS=1` leaves all work as it is written.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from TIDE.engine.cache.slots import Slots
from TIDE.kernels.triton.compile_ahead import compiled_ahead

logger = logging.getLogger(__name__)


class Held:
    """A tensor that graphs read, as part of their key: it equals no other tensor, and stays where it is while they do.

    Args:
        tensor: None: there is none.
    """

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return hash(id(self.tensor))


def why_no_graphs(device: torch.device) -> str | None:
    """Return why nothing is captured on a device; None: it is."""
    if os.environ.get("TIDE_NO_GRAPHS") == "1":
        return "TIDE_NO_GRAPHS=1 is set"
    return None if device.type == "cuda" else f"there are none on {device.type}"


class Graphs:
    """Captured work, by what it does.

    Attributes:
        without: why nothing is captured; None: it is.
        seconds: spent on captures.
    """

    def __init__(self, device: torch.device) -> None:
        self.without = why_no_graphs(device)
        self.seconds = 0.0
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, Any] = {}
        self._pool = None if self.without else torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, work: Callable[[], object]) -> bool:
        """Run `work`, or replay its graph. Per key it must launch the same kernels on the same buffers and never synchronize.

        Returns:
            True at steady-state speed: not a first run, not a capture.
        """
        known = key in self._captured or (key in self._seen and self.without is not None)
        if key not in self._captured and key in self._seen and self.without is None:
            self._capture(key, work)
        if key in self._captured:
            self._captured[key].replay()
        else:
            self._seen.add(key)
            work()
        return known

    def _capture(self, key: Hashable, work: Callable[[], object]) -> None:
        began, graph = time.perf_counter(), torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # graphs of an engine that was dropped cannot be freed while another one is captured
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
            self._captured[key] = graph
        except Exception as problem:
            self.without = f"{type(problem).__name__}: {problem}"
            logger.warning("no CUDA graph could be captured, so kernels are launched one by one: %s", self.without)
        finally:
            if collects:
                gc.enable()
        self.seconds += time.perf_counter() - began


class GraphPool:
    """The graphs of all slots.

    Attributes:
        launched: pieces of work, of all requests.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launched = 0
        self.of: dict[Slots, Graphs] = {}
        self._dropped_seconds = 0.0
        self._only_compiles = False

    @property
    def without(self) -> str | None:
        """Why rounds are not captured; None: they are."""
        failed = (graphs.without for graphs in self.of.values() if graphs.without is not None)
        return why_no_graphs(self.device) or next(failed, None)

    @property
    def seconds(self) -> float:
        """Spent so far on captures."""
        return sum(graphs.seconds for graphs in self.of.values()) + self._dropped_seconds

    def launch(self, slots: Slots, key: Hashable, work: Callable[[], object]) -> bool:
        """Run work on slots, or replay its graph; return True if that was as fast as it will be from now on."""
        self.launched += 1
        if self._only_compiles:  # a graph captured now would have no kernels
            work()
            return False
        if slots not in self.of:
            self.of[slots] = Graphs(self.device)
        return self.of[slots].run(key, work)

    def drop(self, slots: Slots) -> None:
        """Give up what was captured on slots."""
        graphs = self.of.pop(slots, None)
        self._dropped_seconds += 0.0 if graphs is None else graphs.seconds

    @contextmanager
    def compiled_ahead(self, shows: bool) -> Iterator[None]:
        """Compile, many at a time, the kernels of work that is launched in here; it does not run."""
        with compiled_ahead(shows):
            self._only_compiles = True
            try:
                yield
            finally:
                self._only_compiles = False
