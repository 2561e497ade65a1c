"""Triton kernels compiled ahead, many at a time.

    with compiled_ahead():
        work()                  launches of this thread only say what has to be compiled
    work()                      everything is there

What kernels would have written is not there after the first time, so it must not matter: buffers are nobody's, and those that
hold indices are zeros.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

from tqdm import tqdm

MOST_THREADS = 16
ONE_AT_A_TIME = threading.Lock()  # there is one `JITFunction.run` for all threads


@contextmanager
def compiled_ahead(shows: bool) -> Iterator[None]:
    """Compile what is launched in this thread instead of running it, and wait for it at the end.

    What a compiler refuses it refuses again when it is launched, so errors are left to that.

    Args:
        shows: a progress bar.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    thread, threads = threading.get_ident(), min(MOST_THREADS, os.cpu_count() or 1)
    with ONE_AT_A_TIME, _Pool(threads) as pool, AsyncCompileMode(pool, ignore_errors=True) as mode:
        run = JITFunction.run

        def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(self, *given, grid=grid, warmup=warmup or threading.get_ident() == thread, **options)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
        asked = list(mode.raw_futures)
        for _ in tqdm(as_completed(asked), total=len(asked), desc="compiling", unit="kernel", disable=not shows, leave=False):
            pass


class _Pool(ThreadPoolExecutor):
    """Threads that compile kernels, and for each the code that launches it, which a first launch would compile alone."""

    def submit(self, compile_: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_with_launcher, compile_, *args, **kwargs)


def _with_launcher(compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from triton.runtime import driver

    kernel = compile_(*args, **kwargs)
    with suppress(Exception):  # the launch makes its own then
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel
