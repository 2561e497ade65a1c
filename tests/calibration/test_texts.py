"""Texts from files and data sets: what is read, what counts in it, and what is refused."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import pytest

from families import build
from TIDE.calibration import self_texts
from TIDE.calibration import texts as module
from TIDE.calibration.texts import load_texts

WORDS = [f"Document number {number} is about the letter {chr(65 + number % 26)}." for number in range(100)]
ANSWER = "It is a long way to the sea."


@pytest.fixture
def write(tmp_path):
    """Write a file and give its path: records as .jsonl, documents as .txt."""

    def write(content, name=None):
        as_json = not all(isinstance(entry, str) for entry in content)
        path = tmp_path / (name or ("texts.jsonl" if as_json else "texts.txt"))
        path.write_text("\n".join(map(json.dumps, content)) if as_json else "\n\n".join(content), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` package whose every data set has the records given; `calls` and `read` tell what was asked of it."""
    package = types.ModuleType("datasets")
    package.calls, package.read, package.records = [], 0, []

    def load_dataset(*args, **kwargs):
        package.calls.append((args, kwargs))
        for record in package.records:
            if isinstance(record, Exception):
                raise record
            package.read += 1
            yield record

    package.load_dataset = load_dataset
    package.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    monkeypatch.setattr(module, "hub_trouble", lambda: None)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


def halves(text, tokenizer):
    return tokenizer.decode(text.ids[: text.start]), tokenizer.decode(text.ids[text.start :])


def test_self_is_written_by_the_model(writer, plain, monkeypatch):
    monkeypatch.setattr(module, "write_texts", lambda *given: list(given))
    assert load_texts("self", writer, plain, 30, 7, 50) == [writer, plain, 30, 7, 50]


def test_a_text_file_has_documents_between_blank_lines(writer, plain, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes("\ufeff\r\n\r\n".encode() + "\r\n \r\n\r\n".join(f"{a}\r\n{a}" for a in WORDS[:25]).encode())
    texts = load_texts(str(path), writer, plain, 25, 0)
    assert sorted(halves(text, plain)[1] for text in texts) == sorted(f"{a}\n{a}" for a in WORDS[:25])
    assert {text.start for text in texts} == {1}
    assert [text.group for text in texts] == list(range(25))


def test_any_other_file_that_is_here_is_read_as_text(writer, plain, write):
    assert len(load_texts(write(WORDS[:20], "notes.md"), writer, plain, 20, 0)) == 20


def test_a_file_with_more_is_sampled(writer, plain, write):
    path = write(WORDS)
    texts = load_texts(path, writer, plain, 30, 0)
    assert len(texts) == 30 and texts == load_texts(path, writer, plain, 30, 0)
    numbers = [int(plain.decode(text.ids[1:]).split()[2]) for text in texts]
    assert len(set(numbers)) == 30 and max(numbers) > 60
    assert texts != load_texts(path, writer, plain, 30, 1)


def test_a_file_with_fewer_is_used_whole_and_says_so(writer, plain, write, caplog):
    assert len(load_texts(write(WORDS[:25]), writer, plain, 40, 0)) == 25
    assert "there is room for 40 texts and it has 25" in caplog.text


def test_a_long_document_gives_pieces_of_one_group(writer, plain, write):
    long = "".join(chr(97 + place % 26) for place in range(1031))  # with <s> two pieces, and eight tokens that are dropped
    texts = load_texts(write([long, *WORDS[:25]]), writer, plain, 100, 0)
    pieces = [text for text in texts if len(text.ids) == 512]
    assert len(texts) == 27 and len({text.group for text in pieces}) == 1
    assert plain.decode(pieces[0].ids[1:] + pieces[1].ids) == long[:1023]
    assert [text.start for text in pieces] == [1, 1]


def test_pieces_fit_into_the_context(plain, write):
    texts = load_texts(write(["so " * 60 + word for word in WORDS]), build("llama"), plain, 50, 0)
    assert len(texts) == 50 and max(len(text.ids) for text in texts) <= 256


def test_long_documents_leave_room_for_others(writer, plain, write):
    texts = load_texts(write(["la " * 3000, *WORDS[:30]]), writer, plain, 31, 0)
    assert len({text.group for text in texts}) == 31


USER, BOT = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": ANSWER}
PAIR = ("<s>Where is it?", "\n" + ANSWER)
CHAT = ("<s><user>Where is it?</s>\n<bot>", ANSWER + "</s>")
SHAPES = {
    "text": ({"text": ANSWER, "prompt": "x", "answer": "y"}, ("<s>", ANSWER), ("<s>", ANSWER)),
    "response": ({"prompt": "Where is it?", "response": ANSWER}, PAIR, CHAT),
    "completion": ({"prompt": "Where is it?", "completion": ANSWER}, PAIR, CHAT),
    "answer": ({"prompt": "Where is it?", "answer": ANSWER, "text": None}, PAIR, CHAT),
    "own space": ({"prompt": "Where is it? ", "answer": ANSWER}, ("<s>Where is it? ", ANSWER), None),
    "question": ({"question": "Where is it?", "answer": ANSWER, "id": 3}, PAIR, CHAT),
    "messages": ({"prompt": "x", "messages": [USER, BOT]}, None, CHAT),
    "trailing user": ({"messages": [USER, BOT, USER]}, None, CHAT),
    "two answers": (
        {"messages": [USER, {"role": "assistant", "content": "There."}, USER, BOT]},
        None,
        ("<s><user>Where is it?</s>\n<bot>There.</s>\n<user>Where is it?</s>\n<bot>", ANSWER + "</s>"),
    ),
}


CASES = [
    (shape, kind) for shape, case in SHAPES.items() for kind, parts in zip(("plain", "chatty"), case[1:], strict=True) if parts
]


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_records_of_every_shape(shape, kind, writer, write, request):
    record, *expected = SHAPES[shape]
    tokenizer, parts = request.getfixturevalue(kind), expected[kind == "chatty"]
    texts = load_texts(write([record] * 20), writer, tokenizer, 20, 0)
    assert len(texts) == 20
    assert {halves(text, tokenizer) for text in texts} == {parts}


ALONE = [
    {"turns": ["Where is it?", "And now?"]},
    {"prompt": "Where is it?"},
    {"question": "Where is it?"},
    {"messages": [USER]},
]


def test_prompts_alone_are_answered_by_the_model(chatty, write):
    writer = build("llama", max_position_embeddings=48)
    texts = load_texts(write([*ALONE * 5, {"text": ANSWER}, {"prompt": " "}]), writer, chatty, 30, 0)
    assert sorted(text.group for text in texts) == list(range(21))
    assert {halves(text, chatty)[0] for text in texts} == {CHAT[0], "<s>"}
    alone = self_texts.answer_prompts(writer, chatty, ["Where is it?"], 5)[0]
    assert all(text.ids == alone.ids for text in texts if text.start > 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"line 2 is not JSON .*Expected an object with \"text\""),
        ('["text"]', "line 2 should be an object with .*, found list"),
        ('{"body": "x", "id": 1}', r"line 2 has the keys \['body', 'id'\]; expected \"text\"; \"prompt\" with"),
        ('{"text": null}', r"line 2 has the keys \[\]; expected"),
        ('{"text": 3}', 'line 2: "text" should be a string, found int'),
        ('{"turns": []}', r'line 2: "turns" should be a list of what the user says, found \[\]'),
        ('{"messages": "hi"}', 'line 2: "messages" should be a list of objects'),
        ('{"messages": [{"role": "system", "content": "x"}]}', r"role \"user\", found the roles \['system'\]"),
        (b"\xff\xfe{}", "line 2 is not UTF-8 text"),
    ],
)
def test_a_bad_line_is_named(line, message, writer, chatty, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=message):
        load_texts(str(path), writer, chatty, 20, 0)


def test_messages_need_a_template_that_takes_them(writer, plain, chatty, write, monkeypatch):
    path = write([{"messages": [USER, BOT]}] * 20)
    with pytest.raises(ValueError, match="no chat template to write them with. Use a file with"):
        load_texts(path, writer, plain, 20, 0)
    monkeypatch.setattr(chatty, "chat_template", "{{ raise_exception('no answers please') }}")
    with pytest.raises(ValueError, match=r"the chat template refuses messages .*'assistant'\]: no answers please"):
        load_texts(path, writer, chatty, 20, 0)


def test_too_little_is_refused(writer, plain, write):
    with pytest.raises(ValueError, match="has 19 usable documents; at least 20 are needed"):
        load_texts(write([*WORDS[:19], "short"]), writer, plain, 50, 0)
    with pytest.raises(ValueError, match="has no usable text: expected documents of at least 16 tokens"):
        load_texts(write(["short", "shorter"]), writer, plain, 50, 0)
    with pytest.raises(FileNotFoundError, match="there is no file nowhere.txt. Give the path"):
        load_texts("nowhere.txt", writer, plain, 50, 0)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("wikitext", ("Salesforce/wikitext", "wikitext-2-raw-v1", "train")),
        ("wikitext:wikitext-103-raw-v1:test", ("Salesforce/wikitext", "wikitext-103-raw-v1", "test")),
        ("me/poems", ("me/poems", None, "train")),
        ("me/poems:short", ("me/poems", "short", "train")),
        ("me/poems::test", ("me/poems", None, "test")),
    ],
)
def test_a_data_set_is_streamed_as_far_as_needed(source, asked, writer, plain, hub):
    hub.records = [{"text": ""}, *({"text": word} for word in WORDS)]
    texts = load_texts(source, writer, plain, 30, 0)
    assert [plain.decode(text.ids[1:]) for text in texts] == WORDS[:30]
    assert hub.calls == [(asked[:2], dict(split=asked[2], streaming=True))]
    assert hub.read == 31


def test_a_data_set_that_cannot_be_loaded_gives_no_text(writer, plain, hub, write):
    hub.records = [ConnectionError("no way there")]
    message = r'me/poems .*cannot be loaded: ConnectionError: no way there. Give the path of a .txt or .jsonl file, or "self"'
    with pytest.raises(OSError, match=message):
        load_texts("me/poems", writer, plain, 20, 0)
    hub.records = [*({"text": word} for word in WORDS[:25]), ConnectionError("lost on the way")]
    with pytest.raises(OSError, match="cannot be loaded: ConnectionError: lost on the way"):
        load_texts("me/poems", writer, plain, 30, 0)
    hub.records = [{"lyrics": "la"}]
    with pytest.raises(ValueError, match=r"me/poems, record 1 has the keys \['lyrics'\]; expected"):
        load_texts("me/poems", writer, plain, 30, 0)
    with pytest.raises(ValueError, match=r'a data set is "name", .* found \'a:b:c:d\''):
        load_texts("a:b:c:d", writer, plain, 30, 0)


def test_without_the_package_a_data_set_is_refused(writer, plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'wikitext' is neither a file .* pip install 'datasets>="):
        load_texts("wikitext", writer, plain, 20, 0)
