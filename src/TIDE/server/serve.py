"""The server process: uvicorn, and what happens when it is told to stop.

SIGTERM or Ctrl-C: /health is 503, new requests are refused, answers under way are finished. What is not done after
`drain_seconds` ends with an error; then connections are closed and the process ends. A second signal is the end of that time.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from TIDE.server.guard import log_to
from TIDE.server.service import Service

GRACE = 5.0  # seconds that clients have to read the ends of their answers
HASTE = 1  # the same after a second signal


class _Server(uvicorn.Server):
    """A uvicorn that drains the worker before it closes connections, and listens meanwhile."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self.service = service
        self.ready = ready
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._is_hurried = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        gc.collect()
        gc.freeze()  # model and libraries stay: looking through them again would hold all answers up for a quarter of a second
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gc.unfreeze()
        worker, seconds = self.service.worker, self.service.settings.drain_seconds
        drained, until = asyncio.ensure_future(worker.stop(seconds)), time.perf_counter() + seconds + GRACE
        while (not drained.done() or self.server_state.tasks) and not self._is_hurried and time.perf_counter() < until:
            await asyncio.sleep(0.05)
        drained.cancel()
        await worker.stop(0)
        await super().shutdown(sockets=sockets)


def serve(app: FastAPI, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve an application until the process is told to stop; `ready` gets the address once there is one."""
    log_to(logging.StreamHandler())
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=HASTE,
    )
    _Server(config, service, ready).run()
