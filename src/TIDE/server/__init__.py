"""An HTTP server that speaks OpenAI's API in vLLM's dialect: `tide serve`, or `create_app` under any ASGI server.

    app = TIDE.server.create_app("default", router=TIDE.default_router())

One thread owns the engine; everything else is asyncio. A request becomes one row per answer, and rows come and go between
rounds, so the text of an answer does not depend on what else the server is doing.
"""

from importlib.util import find_spec

if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]:
    raise ImportError(f"the server needs {', '.join(missing)}. Install with: pip install 'tide-inference[serve]'")

from TIDE.server.app import create_app
from TIDE.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
