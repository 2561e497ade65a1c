"""Errors as clients know them: OpenAI's shape, vLLM's types.

{"error": {"message": ..., "type": "BadRequestError", "param": "top_p", "code": 400}}

No path and no traceback is in an answer; they are in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    499: "ClientClosedRequest",
    503: "ServiceUnavailableError",
}
ABSENT = {  # paths of OpenAI's API, and why they are not here
    "/v1/responses": "answers are not stored. Send the whole conversation to /v1/chat/completions",
    "/v1/embeddings": "the model that is served writes text and returns no embeddings",
}
INTERNAL = "the server failed to answer. Its log has the reason."


class APIError(Exception):
    """An error for the client, with its HTTP status.

    Args:
        param: the field of the request it is about.
    """

    def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def refused(message: str, param: str | None = None) -> APIError:
    """Return the error of a request that asks for what cannot be."""
    return APIError(400, message, param)


def no_route(path: str, routes: Sequence[str]) -> APIError:
    """Return the error of a path that is not here: why, if OpenAI's API has it, and the paths that are."""
    reasons = [f": {reason}" for absent, reason in ABSENT.items() if path == absent or path.startswith(f"{absent}/")]
    return APIError(404, f"there is no {path[:200]} here{''.join(reasons)}. There are {', '.join(dict.fromkeys(routes))}.")


def of_row(problem: Exception) -> APIError:
    """Return what a client is told of an error that ended its answer. Only errors of the engine are written for it."""
    if isinstance(problem, APIError):
        return problem
    if isinstance(problem, ValueError | TypeError) and "\n" not in str(problem):
        return APIError(400, str(problem))
    logger.error("an answer failed: %s: %s", type(problem).__name__, problem)
    return APIError(500, str(problem) if isinstance(problem, FloatingPointError) else INTERNAL)


BRANCH = re.compile(r"[\[\]-]|^(str|int|bool|float|list|dict|NamedTool)$")  # how pydantic names the branches of a union


def _closeness(problem: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """Return how near an error is to what was meant: of a union, each branch has its own."""
    return problem["type"] == "extra_forbidden", not problem["type"].endswith("_type"), len(problem["loc"])


def of_validation(problems: Sequence[Mapping[str, Any]]) -> APIError:
    """Return the first of pydantic's errors, with the name of the field."""
    if not problems:
        return refused("the request is not what was expected. See /openapi.json.")
    chosen = max(problems, key=_closeness)
    place = [str(part) for part in chosen["loc"] if part != "body" and not BRANCH.search(str(part))]
    name = place[0] if place else None
    if chosen["type"] == "json_invalid":
        reason = chosen.get("ctx", {}).get("error", "it cannot be read")
        return refused(f"the body is not valid JSON: {reason}. Send a JSON object.")
    if chosen["type"] in ("extra_forbidden", "none_required"):
        return refused(f"this server has no field {'.'.join(place)!r}. Leave it out.", name)
    if not place:
        return refused("expected a JSON object, with the header Content-Type: application/json.")
    if chosen["type"] == "missing":
        return refused(f"expected a value for {'.'.join(place)!r}, found none.", name)
    if chosen["type"] == "nested":
        return refused(f"{'.'.join(place)}: {chosen['msg']}.", name)
    return refused(f"{'.'.join(place)}: {chosen['msg']}, found {_shown(chosen.get('input'))}.", name)


def _shown(value: Any) -> str:
    try:
        found = repr(value)
    except RecursionError:
        return "JSON that is nested too deep"
    return found if len(found) <= 80 else f"{found[:77]}..."
