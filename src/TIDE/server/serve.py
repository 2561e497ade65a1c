"""The server process: uvicorn, and what happens when it is told to stop.

SIGTERM or Ctrl-C: no new connections, /health is 503, answers under way are finished. What is not done after `drain_seconds`
ends with an error; then the process ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from TIDE.server.guard import log_to
from TIDE.server.service import Service

GRACE = 5.0  # seconds that connections have to close once all answers have ended


class _Server(uvicorn.Server):
    """A uvicorn that drains the worker before connections are closed."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self.service = service
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        gc.collect()
        gc.freeze()  # model and libraries stay: looking through them again would hold all answers up for a quarter of a second
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gc.unfreeze()
        drained = asyncio.ensure_future(self.service.worker.stop(self.service.settings.drain_seconds))
        await super().shutdown(sockets=sockets)
        await drained


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
        timeout_graceful_shutdown=int(service.settings.drain_seconds + GRACE),
    )
    _Server(config, service, ready).run()
