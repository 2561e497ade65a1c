"""Settings of a server: one set of defaults, and what they need."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import TIDE.cli.serve as command
import TIDE.server
import TIDE.server.app as app
import TIDE.server.serve as process
from commands import tide
from TIDE.cli.serve import serve


def test_the_command_has_the_defaults_of_the_settings():
    settings = TIDE.server.ServerSettings()
    taken = inspect.signature(serve).parameters
    for name in ("max_model_len", "max_rows", "max_queue", "request_seconds", "drain_seconds", "salted_keys", "vllm_metrics"):
        assert taken[name].default == getattr(settings, name), name


def test_packages_of_the_server_are_asked_for_when_it_is_used(monkeypatch):
    monkeypatch.setattr(TIDE.server, "find_spec", lambda name: None)
    assert TIDE.server.ServerSettings().max_rows
    with pytest.raises(
        ImportError, match=r"the server needs fastapi, uvicorn, prometheus_client. Install with: pip install 'fastapi>"
    ):
        _ = TIDE.server.create_app
    with pytest.raises(AttributeError, match="no attribute 'make_app'. It has ServerSettings, create_app"):
        _ = TIDE.server.make_app


def test_the_command_line_does_not_import_the_server():
    script = "import sys, TIDE.cli.app; assert not {'fastapi', 'uvicorn', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_command_bounds_the_k_v_of_the_engine(monkeypatch):
    given = []
    monkeypatch.setattr(command, "load", lambda *_, **__: None)
    monkeypatch.setattr(app, "create_app", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(process, "serve", lambda *_: None)
    assert tide("serve", "default", "--cache-gib", "0.5").exit_code == 0
    ((_, _, config, _),) = given
    assert config.cache_gib == 0.5
