"""One tiny model with its tokenizer, prompts, texts and a router file for all tests of commands."""

from __future__ import annotations

import json

import pytest

import TIDE
from characters import TEMPLATE, characters
from commands import Warm
from families import build
from router_files import made


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    characters(TEMPLATE).save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"Say {n}."}) for n in range(20)))
    (folder / "texts.txt").write_text("\n\n".join(f"Document {n} is about the number {n * n}." for n in range(30)))
    return folder


@pytest.fixture(scope="session")
def shared_router(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("router") / "router.safetensors"
    made("memory", TIDE.load_model(folder).model).save(path)
    return path


@pytest.fixture
def router(shared_router, tmp_path):
    """A router file of the test's own."""
    path = tmp_path / "router.safetensors"
    path.write_bytes(shared_router.read_bytes())
    return path


@pytest.fixture(scope="session")
def warm():
    process = Warm()
    yield process
    process.close()
