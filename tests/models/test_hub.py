"""A hub that cannot be reached: known in seconds, said in a line, and what was downloaded before is used."""

from __future__ import annotations

import http.server
import shutil
import threading
import time

import pytest

import TIDE
from TIDE.hub import EXPECTED, check_datasets
from TIDE.routing.source import load_router


class NoWay(http.server.BaseHTTPRequestHandler):
    """Takes a request and never answers."""

    def do_HEAD(self):
        time.sleep(600)


@pytest.fixture(autouse=True)
def no_known_hub(monkeypatch):
    """transformers keeps a client for the first hub it asks."""
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)


@pytest.fixture(params=["refused", "silent"])
def no_hub(request, monkeypatch, tmp_path):
    """A hub that refuses connections, or takes them and stays silent; nothing was downloaded before."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoWay)
    if request.param == "silent":
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        server.server_close()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("TIDE.hub.TIMEOUT", 1.0)
    yield
    if request.param == "silent":
        server.shutdown()
        server.socket.close()  # not server_close, which waits for the threads that stay silent


def test_a_hub_that_cannot_be_reached_fails_with_a_line(no_hub):
    began = time.perf_counter()
    with pytest.raises(OSError, match=r"cannot load 'no/such-model': expected .* The hub cannot be reached \(http://127"):
        TIDE.load_model("no/such-model")
    with pytest.raises(OSError, match=r"file of 'no/such-router': the hub cannot be reached .* was not downloaded before"):
        TIDE.RouterFile.from_pretrained("no/such-router")
    assert time.perf_counter() - began < 300  # two on a quiet machine; the hub is silent for ten minutes


class Broken(http.server.BaseHTTPRequestHandler):
    """Answers at first, and then breaks every connection, or sends a page as a proxy does."""

    page = b""

    def do_HEAD(self):
        if self.path != "/" and not self.page:
            return  # without an answer
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()

    def do_GET(self):
        if self.page:
            self.do_HEAD()
            self.wfile.write(self.page)

    def log_message(self, *told):
        pass


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (b"", "the connection to http://127.* broke"),
        (b"<html>Sign in</html>", "is not what a hub sends|hub cannot be reached|EXPECTED"),
    ],
    ids=["broken", "proxy"],
)
def test_a_hub_whose_answers_break_is_an_error_of_one_line(page, said, monkeypatch, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Broken,), {"page": page}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", at)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", at + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for load in (load_router, TIDE.RouterFile.from_pretrained, TIDE.load_model):
        with pytest.raises(OSError, match=f"cannot load .*'my-org/one': .*({said.replace('EXPECTED', EXPECTED)})"):
            load("my-org/one")
    server.shutdown()
    server.server_close()


def test_earlier_downloads_are_used_without_the_hub(no_hub, folder, monkeypatch, tmp_path):
    """A folder as the hub's cache has it."""
    snapshot = tmp_path / "models--my-org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--my-org--tiny" / "refs").mkdir()
    (tmp_path / "models--my-org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert TIDE.load_model("my-org/tiny", device="cpu").model.config.num_hidden_layers == 4


def test_a_data_set_needs_its_package_before_anything_else(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'wikitext' is neither a file here nor .*pip install 'datasets>="):
        check_datasets("wikitext")
