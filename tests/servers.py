"""Servers for tests: a tiny model behind HTTP, in a thread of this process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import httpx
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from families import build
from TIDE.models.gguf import Loaded
from TIDE.server import ServerSettings, create_app
from TIDE.server.guard import access

SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<bot>"]
TEMPLATE = (
    "<s>{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('there is no such role') }}{% endif %}"
    "<{{ 'user' if m['role'] == 'user' else 'bot' }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def bytewise(template: str | None = TEMPLATE, **options: object) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, written as byte-level BPE writes them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: place for place, token in enumerate([*SPECIAL, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=["<user>", "<bot>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **names, **options)


def tiny(**changes: object) -> Loaded:
    """A random model whose last layers change little, so that exits before them are often right."""
    model = build("llama", vocab_size=len(SPECIAL) + 256, max_position_embeddings=1024, **changes)
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data *= 0.2
        layer.mlp.down_proj.weight.data *= 0.2
    model.config.name_or_path = "tiny"
    return Loaded(model, bytewise())


class Lines(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Running:
    """A server in a thread, until it is closed."""

    def __init__(
        self, loaded: Loaded, router: object = None, settings: ServerSettings | None = None, **options: object
    ) -> None:
        self.app = create_app(loaded, router, options.pop("config", None), settings)
        config = uvicorn.Config(self.app, port=0, log_level="error", access_log=False, timeout_graceful_shutdown=240, **options)
        self.server = uvicorn.Server(config)
        self.log = Lines()
        access.addHandler(self.log)
        access.setLevel(logging.INFO)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        until = time.monotonic() + 480
        while not self.server.started:
            assert self.thread.is_alive() and time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=240)

    @property
    def worker(self):
        return self.app.state.service.worker

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def lines(self, count: int) -> list[str]:
        """The access log, once it has so many lines: each is written after its answer."""
        until = time.monotonic() + 120
        while len(self.log.lines) < count and time.monotonic() < until:
            time.sleep(0.005)
        return self.log.lines

    def is_idle(self, seconds: float = 120.0) -> bool:
        """Whether nothing is left running, soon."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.worker._open and not self.worker.decoder.running and not self.worker.engine._shared_batch().rows:
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(240)
        access.removeHandler(self.log)
        assert not self.thread.is_alive()
