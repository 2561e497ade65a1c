"""The guard that every request passes: an id, the key, the size of its body, and one line of log when it is over.

{"time": …, "id": "…", "method": "POST", "path": "/v1/chat/completions", "status": 200, "seconds": 0.41, "client": …,
 "model": …, "prompt_tokens": 12, "completion_tokens": 64, …}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any

from TIDE.server.errors import INTERNAL, APIError
from TIDE.server.settings import ServerSettings

logger = logging.getLogger(__name__)
access = logging.getLogger("TIDE.server.access")
access.propagate = False  # its lines are JSON, and go where `log_to` says
OPEN = ("/", "/health")  # paths that need no key
SANE_ID = re.compile(rb"[\w.-]{1,64}")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        self._keys = [_digest(key.strip().encode()) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        began, client = time.perf_counter(), scope.get("client")
        facts: dict[str, Any] = dict(  # of the line of log; the parts of the server add theirs
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            id=request_id,
            method=scope["method"],
            path=scope["path"][:200],
            client=client[0] if client else None,
        )
        scope["tide"] = facts

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._guarded(scope, receive, answer, headers)
        except Exception as problem:
            logger.exception("request %s failed", request_id)
            facts["error"] = type(problem).__name__
            if "status" not in facts:
                await APIError(500, INTERNAL).response()(scope, receive, answer)
        finally:
            facts.setdefault("status", 499)  # nothing was sent: the client went away
            facts["seconds"] = round(time.perf_counter() - began, 4)
            access.info(json.dumps(facts))

    async def _guarded(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> None:
        try:
            if scope["path"] not in OPEN:
                digest = self._checked_key(headers.get(b"authorization", b""))
                scope["salt"] = digest.hex() if self.settings.salted_keys else ""
            body = await self._body(receive, headers.get(b"content-length", b"0"))
        except APIError as error:
            scope["tide"]["error"] = error.message
            await error.response()(scope, receive, send)
            return
        if body is None:
            scope["tide"]["status"] = 499
            return
        read = [dict(type="http.request", body=body, more_body=False)]

        async def replay() -> MutableMapping[str, Any]:
            return read.pop() if read else await receive()

        await self.app(scope, replay, send)

    def _checked_key(self, given: bytes) -> bytes:
        """Compare with every key, in a time that does not depend on them; return the digest of the one given."""
        if not self._keys:
            return b""
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, valid) for valid in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise APIError(
                401, "expected a valid API key as 'Authorization: Bearer KEY'.", headers={"WWW-Authenticate": "Bearer"}
            )
        return digest

    async def _body(self, receive: Receive, announced: bytes) -> bytes | None:
        """Return the body, if it is not too large; None: the client went away."""
        limit = self.settings.max_body
        too_large = APIError(413, f"a request may have {limit} bytes at most. Send less.", headers={"Connection": "close"})
        if announced.isdigit() and int(announced) > limit:
            raise too_large
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise too_large
        return body


def log_to(handler: logging.Handler) -> None:
    """Write the access log to a handler, a JSON object a line."""
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers = [handler]
    access.setLevel(logging.INFO)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
