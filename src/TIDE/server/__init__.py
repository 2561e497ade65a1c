"""An HTTP server that speaks OpenAI's API in vLLM's dialect: `tide serve`, or `create_app` under any ASGI server.

    app = TIDE.server.create_app("default", router=TIDE.default_router())

One thread owns the engine; everything else is asyncio. A request becomes one row per answer, and rows come and go between
rounds, so the text of an answer does not depend on what else the server is doing.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from TIDE.extras import install_command
from TIDE.server.settings import ServerSettings

if TYPE_CHECKING:
    from TIDE.server.app import create_app

__all__ = ["ServerSettings", "create_app"]


def __getattr__(name: str) -> Any:
    """Import the application when it is first used: settings alone need none of its packages."""
    if name != "create_app":
        raise AttributeError(f"module 'TIDE.server' has no attribute {name!r}. It has {', '.join(__all__)}.")
    if missing := [package for package in ("fastapi", "uvicorn", "prometheus_client") if find_spec(package) is None]:
        raise ImportError(f"the server needs {', '.join(missing)}. Install with: {install_command('serve')}")
    from TIDE.server.app import create_app

    return create_app
