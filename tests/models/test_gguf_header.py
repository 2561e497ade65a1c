"""The header of a GGUF file tells the sizes of its model, without its arrays and before anything is loaded."""

from __future__ import annotations

import importlib.util

import pytest

import TIDE
from characters import TEMPLATE, characters
from commands import tide
from families import build
from gguf_files import write_gguf
from TIDE.models.gguf_header import Array, entries
from TIDE.models.sizes import Sizes, model_sizes
from TIDE.routing.fingerprint import fingerprint

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


@pytest.fixture
def file(tmp_path):
    model = build("llama")
    write_gguf(tmp_path / "tiny-q8_0.gguf", model, characters(TEMPLATE))
    return tmp_path / "tiny-q8_0.gguf"


def test_the_header_is_what_the_gguf_package_reads(file):
    from gguf import GGUFReader, GGUFValueType

    found = dict(entries(file))
    fields = {name: field for name, field in GGUFReader(file).fields.items() if not name.startswith("GGUF.")}
    assert found.keys() == fields.keys()
    for name, field in fields.items():
        is_array = field.types[0] == GGUFValueType.ARRAY
        assert found[name] == (Array(len(field.contents())) if is_array else field.contents()), name


def test_every_kind_of_value_is_read(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "x")
    for name, value in (("a", True), ("b", -3), ("c", 2.5), ("d", "word"), ("e", 2**40)):
        writer.add_key_value(name, value, gguf.GGUFValueType.UINT64 if name == "e" else gguf.GGUFValueType.get_type(value))
    writer.add_array("f", [1, 2, 3])
    writer.add_array("g", ["one", "two"])
    writer.add_array("h", [["one"], ["two", "three"]])
    writer.add_uint32("last", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = dict(entries(tmp_path / "a.gguf"))
    assert (found["a"], found["b"], found["c"], found["d"], found["e"]) == (True, -3, 2.5, "word", 2**40)
    assert (found["f"], found["g"], found["h"], found["last"]) == (Array(3), Array(2), Array(2), 7)


def test_the_sizes_are_those_of_the_loaded_model(file, tmp_path):
    model = TIDE.load_model(file).model
    own = fingerprint(model)
    assert model_sizes(str(file)) == Sizes(own.num_layers, own.hidden_dim, own.vocab_size)
    model.save_pretrained(tmp_path / "folder")
    assert model_sizes(str(tmp_path / "folder")) == model_sizes(str(file))
    assert own.name == "tiny-q8_0.gguf", "the file's name, not that of its folder"


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_a_damaged_file_has_no_sizes(file, damage):
    content = file.read_bytes()
    file.write_bytes({"truncated": content[:60], "empty": b"", "other": b"PK\3\4" + content[4:]}[damage])
    with pytest.raises(ValueError, match="no GGUF file|damaged|empty"):
        dict(entries(file))
    assert model_sizes(str(file)) is None


def test_a_router_file_of_another_model_is_refused_by_the_header(file, monkeypatch):
    def load(name, **_):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(TIDE, "load_model", load)
    done = tide("generate", "hi", "--model", file, "--router", "default")
    assert done.exit_code == 2 and done.stdout == ""
    assert "was made for SmolLM2-135M-Instruct (30 layers of 576" in done.stderr and f"tide calibrate {file}." in done.stderr
