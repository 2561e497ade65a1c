"""Prompts are UTF-8, with or without a byte order mark; anything else is refused in a line."""

from __future__ import annotations

import codecs
import json

import pytest

from commands import tide

ASKED = '{"prompt": "Où est la gare ?"}\n'
OTHERS = {
    "latin-1": (ASKED.encode("latin-1"), "byte 0xf9 at 13"),
    "UTF-16": (ASKED.encode("utf-16"), "UTF-16"),
    "UTF-16 without a mark": ('{"prompt": "hi"}'.encode("utf-16-le"), "zero bytes"),
}
others = pytest.mark.parametrize(("data", "found"), OTHERS.values(), ids=list(OTHERS))


def refused(done, name, found) -> None:
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: expected UTF-8 text in {name}, found {found}. Save it as UTF-8, ")
    assert len(done.stderr.splitlines()) == 1


@others
@pytest.mark.parametrize("command", ["generate --file", "bench --file", "certify default --prompts", "tune default --prompts"])
def test_a_file_in_another_encoding_is_refused(command, data, found, tmp_path):
    (tmp_path / "asked.jsonl").write_bytes(data)
    refused(tide(*command.split(), tmp_path / "asked.jsonl"), tmp_path / "asked.jsonl", found)


@others
def test_standard_input_in_another_encoding_is_refused(data, found):
    refused(tide("generate", stdin=data), "standard input", found)


def test_a_chat_in_another_encoding_is_refused(folder):
    refused(tide("chat", folder, "--no-exits", stdin=OTHERS["latin-1"][0]), "standard input", OTHERS["latin-1"][1])


def test_a_byte_order_mark_is_left_out(folder, tmp_path):
    (tmp_path / "asked.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"prompt": "hi"}\r\n{"prompt": "h\xe2\x80\xa8o"}\r\n')
    common = ("generate", "--model", folder, "--no-exits", "--max-new-tokens", 2, "--json")
    done = tide(*common, "--file", tmp_path / "asked.jsonl")
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["hi", "h\u2028o"], done.output
    done = tide(*common, stdin=codecs.BOM_UTF8 + b"hi\n")
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["hi"], done.output


def test_prompts_with_a_byte_order_mark_are_taken(folder, router, tmp_path):
    (tmp_path / "asked.jsonl").write_bytes(codecs.BOM_UTF8 + ASKED.encode())
    asked = ("--router", router, "--prompts", tmp_path / "asked.jsonl", "--max-new-tokens", 2, "--threshold", 0.5, "--json")
    done = tide("tune", folder, *asked, "--strategy", "exact")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["prompts"] == 1
