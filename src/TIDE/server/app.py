"""The ASGI application: routes, and what they share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from TIDE.config import TIDEConfig
from TIDE.engine.engine import TIDE
from TIDE.models.gguf import Loaded
from TIDE.models.load import load_model
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router_file import RouterFile
from TIDE.server import answers, requests
from TIDE.server.chat import chat
from TIDE.server.completions import complete
from TIDE.server.errors import APIError, no_route, of_validation, refused
from TIDE.server.guard import Guard
from TIDE.server.metrics import CONTENT_TYPE
from TIDE.server.service import Service
from TIDE.server.settings import ServerSettings
from TIDE.version import __version__

Asked = TypeVar("Asked", bound=requests.Sampling)


def create_app(
    model: str | Path | Loaded = "default",
    router: str | Path | RouterFile | ExitPolicy | None = None,
    config: TIDEConfig | None = None,
    settings: ServerSettings | None = None,
    *,
    trust_remote_code: bool = False,
) -> FastAPI:
    """Return the ASGI application of a model.

    Args:
        model: what `TIDE.load_model` takes, or what it returned.
        router: what `TIDE.TIDE` takes; None: exits off.
        trust_remote_code: run code that comes with a model of the hub.
    """
    settings = settings or ServerSettings()
    loaded = model if isinstance(model, tuple) else load_model(model, trust_remote_code=trust_remote_code)
    name = loaded.model.config.name_or_path if isinstance(model, tuple) else str(model)
    engine = TIDE(loaded.model, router, config)
    return app_for(Service(engine, loaded.tokenizer, Path(name).name or "default", settings))


def app_for(service: Service) -> FastAPI:
    """Return the ASGI application of a service, whose engine is closed when the application stops."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.worker.start()
            yield
        finally:
            await service.worker.stop(service.settings.drain_seconds)
            service.engine.close()

    app = FastAPI(
        title="TIDE",
        version=__version__,
        lifespan=lifespan,
        responses=answers.ERRORS,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    _add_errors(app)
    _add_routes(app, service)
    app.add_middleware(Guard, settings=service.settings)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(service.settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""

    async def told(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            error = of_validation(error.errors())
        if isinstance(error, HTTPException) and error.status_code == 404:
            error = no_route(request.url.path, [route.path_format for route in app.routes if isinstance(route, Route)])
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, str(error.detail), headers=error.headers)
        assert isinstance(error, APIError)
        request.scope["tide"]["error"] = error.message
        return error.response()

    for kind in (APIError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, told)


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=answers.ChatAnswer)
    async def chat_completions(request: Request, body: Annotated[requests.ChatRequest, Body()]) -> Response:
        """Answer a chat."""
        return await chat(service, request, _salted(request, body))

    @app.post("/v1/completions", response_model=answers.TextAnswer)
    async def completions(request: Request, body: Annotated[requests.CompletionRequest, Body()]) -> Response:
        """Continue a text."""
        return await complete(service, request, _salted(request, body))

    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> Response:
        """List the model under each of its names."""
        return answers.ModelList(data=[_card(service, name) for name in service.names]).response()

    @app.get("/v1/models/{name:path}", response_model=answers.ModelCard)
    async def model(name: str) -> Response:
        """Describe the model."""
        service.check_model(name)
        return _card(service, name).response()

    @app.post("/tokenize", response_model=answers.Tokenized)
    async def tokenize(body: Annotated[requests.TokenizeRequest, Body()]) -> Response:
        """Return the tokens of a text or a chat."""
        return (await service.prompts.run(_tokenized, service, body)).response()

    @app.post("/detokenize", response_model=answers.Detokenized)
    async def detokenize(body: Annotated[requests.DetokenizeRequest, Body()]) -> Response:
        """Return the text of tokens."""
        return (await service.prompts.run(_detokenized, service, body)).response()

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=answers.Health)
    async def health() -> Response:
        """Tell whether requests are answered."""
        worker = service.worker
        if worker.problem is not None or worker.is_draining:
            raise APIError(503, "the model has failed." if worker.problem else "the server is stopping.")
        return answers.Health().response()

    @app.get("/version", response_model=answers.Version)
    async def version() -> Response:
        """Return the version of TIDE."""
        return answers.Version(version=__version__).response()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.text(service.settings.vllm_metrics), media_type=CONTENT_TYPE)

    @app.head("/", include_in_schema=False)
    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """Return a page to chat on."""
        return HTMLResponse(_PAGE.read_text("utf-8"))


_PAGE: Any = files("TIDE.server") / "page.html"


def _card(service: Service, name: str) -> answers.ModelCard:
    return answers.ModelCard(id=name, created=service.created, root=service.root, max_model_len=service.prompts.limit)


def _salted(request: Request, body: Asked) -> Asked:
    """Return a request whose K/V are shared with those of the same salt, and where so set up of the same API key, only."""
    if request.scope.get("salt"):
        body.cache_salt = f"{request.scope['salt']} {body.cache_salt or ''}"
    return body


def _tokenized(service: Service, body: requests.TokenizeRequest) -> answers.Tokenized:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise refused("expected either prompt or messages.", "prompt")
    if body.prompt is not None:
        ids = service.prompts.of_text(body.prompt, body.add_special_tokens) if body.prompt else []
    else:
        ids = service.prompts.of_messages(body)
    found = answers.Tokenized(count=len(ids), max_model_len=service.prompts.limit, tokens=ids)
    if body.return_token_strs:
        found.token_strs = service.prompts.tokenizer.convert_ids_to_tokens(ids)
    return found


def _detokenized(service: Service, body: requests.DetokenizeRequest) -> answers.Detokenized:
    service.check_model(body.model)
    ids = service.prompts.of_text(body.tokens, param="tokens") if body.tokens else []
    return answers.Detokenized(prompt=service.prompts.tokenizer.decode(ids))
