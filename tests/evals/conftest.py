"""A tiny engine with exits and a tokenizer, questions of every kind, and the harness where it is installed."""

from __future__ import annotations

import pytest

import TIDE
from eval_data import data_folder
from families import build
from router_files import a_file


@pytest.fixture(scope="session")
def harness():
    """The real lm-evaluation-harness."""
    return pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: make test-eval installs it")


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="session")
def model():
    return build("llama", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def router(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("router") / "router.safetensors"
    a_file(model, "memory", (0, 2), 0.0).save(path)
    return path


@pytest.fixture
def engine(model, router, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "modules")  # nothing to compile
    with TIDE.TIDE(model, router, TIDE.TIDEConfig(mode="fast", exit_threshold=0.4)) as engine:
        yield engine
