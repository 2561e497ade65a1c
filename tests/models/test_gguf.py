"""GGUF files: metadata are read once, and model and tokenizer are those that transformers makes."""

from __future__ import annotations

import collections
import contextlib

import pytest
import torch

import TIDE
from gguf_files import write_gguf
from TIDE.models.gguf import read_gguf

gguf = pytest.importorskip("gguf")


@pytest.fixture
def path(llama, plain, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", llama, plain)
    return tmp_path / "tiny.gguf"


def test_model_and_tokenizer_are_those_of_transformers(path, monkeypatch):
    ours = read_gguf(path)
    monkeypatch.setattr("TIDE.models.gguf_reader.parsed_once", contextlib.nullcontext)
    theirs = read_gguf(path)
    ids = torch.arange(20)[None]
    assert torch.equal(ours.model(ids).logits, theirs.model(ids).logits)
    assert ours.model.config.to_dict() == theirs.model.config.to_dict()
    assert ours.tokenizer.backend_tokenizer.to_str() == theirs.tokenizer.backend_tokenizer.to_str()
    assert ours.tokenizer.special_tokens_map == theirs.tokenizer.special_tokens_map


def test_every_field_reads_as_gguf_reads_it(path):
    """Also arrays of numbers, of which this tokenizer has none, and an empty one."""
    from TIDE.models.gguf_reader import Reader

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("scores", [0.5, -1.5])
    writer.add_array("types", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["", "a", "ÿ…"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = Reader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents()
        assert ours.fields[name].types == field.types
    assert ours.data_offset == theirs.data_offset


def test_metadata_are_parsed_once_and_gguf_is_left_as_it_was(path, monkeypatch):
    parsed, tables = collections.Counter(), collections.Counter()
    build, table = gguf.GGUFReader._build_fields, gguf.get_tensor_name_map

    def counted(reader, *place):
        parsed[type(reader)] += 1
        return build(reader, *place)

    def counted_table(*model):
        tables[model] += 1
        return table(*model)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counted)
    monkeypatch.setattr(gguf, "get_tensor_name_map", counted_table)
    before = gguf.GGUFReader
    read_gguf(path)
    assert sum(parsed.values()) == 1
    assert set(tables.values()) == {1}
    assert gguf.GGUFReader is before and gguf.get_tensor_name_map is counted_table


def test_the_sizes_of_the_file_and_of_the_weights_are_said(path, capsys):
    model = TIDE.load_model(path, device="cpu").model
    held = sum(weight.nbytes for weight in model.parameters())
    said = capsys.readouterr().err
    assert f"reading tiny.gguf: a file of {path.stat().st_size / 1e6:,.0f} MB, {held / 1e6:,.0f} MB unpacked to float32" in said


def test_a_gguf_file_is_not_quantized_again(path):
    with pytest.raises(ValueError, match="a GGUF file is unpacked when it is loaded, without a quantization_config"):
        TIDE.load_model(path, quantization_config=object())


@pytest.mark.parametrize("size", [0, 3, 100, 3000, -1])
def test_a_damaged_file_is_named(path, size):
    path.write_bytes(path.read_bytes()[:size] if size != 3 else b"abc" * 100)
    with pytest.raises(ValueError, match=r"tiny.gguf is not a GGUF file, or it is damaged \(.*\). Download it again."):
        TIDE.load_model(path, device="cpu")


def test_packages_that_a_gguf_file_needs_are_named(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"model.gguf needs gguf and accelerate. Install with: pip install gguf accelerate"):
        TIDE.load_model(tmp_path / "model.gguf")
