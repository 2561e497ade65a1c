"""Prompts: a user's words in the chat template, from a list or from the lines of a file."""

from __future__ import annotations

import json

import pytest

from TIDE.calibration.prompts import load_prompts, prompt_ids


def templated(tokenizer, *turns: str) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.fixture
def file(tmp_path):
    chat = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}, {"role": "user", "content": "C?"}]
    records = [
        {"prompt": "One?"},
        {"question": "Two?", "answer": "No."},
        {"turns": ["Three?", "Four?"]},
        {"messages": [*chat, {"role": "assistant", "content": "D."}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_every_kind_of_line_is_a_prompt_and_answers_are_left_out(file, chatty):
    expected = [templated(chatty, text) for text in ("One?", "Two?", "Three?")] + [templated(chatty, "A?", "B.", "C?")]
    assert load_prompts(file, chatty) == expected


def test_without_a_template_the_words_are_the_prompt(tmp_path, plain):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One?"}\n\n{"question": "Two?", "answer": "No."}\n')
    assert load_prompts(path, plain) == [plain(text)["input_ids"] for text in ("One?", "Two?")]


def test_a_limit_draws_the_same_ones_each_time_and_not_the_first(tmp_path, plain):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"Number {n}"}) for n in range(50)))
    everything, some = load_prompts(path, plain), load_prompts(path, plain, limit=10)
    assert len(some) == 10 and all(prompt in everything for prompt in some)
    assert some == load_prompts(path, plain, limit=10)
    assert some != everything[:10]
    assert load_prompts(path, plain, limit=99) == everything


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "Hello", "prompts come in a .jsonl file"),
        ("a.jsonl", '{"text": "Once upon a time."}', "record 1 asks nothing"),
        ("a.jsonl", "", "holds no prompts"),
        ("a.jsonl", "{", "line 1 is not JSON"),
    ],
)
def test_a_file_that_asks_nothing_is_an_error(tmp_path, plain, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        load_prompts(tmp_path / name, plain)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_prompts(tmp_path / "missing.jsonl", plain)


def test_token_ids_are_taken_as_they_are_and_strings_need_a_tokenizer(chatty):
    assert prompt_ids([[1, 2], (3,)], None) == [[1, 2], [3]]
    assert prompt_ids(["Hello"], chatty) == [templated(chatty, "Hello")]
    with pytest.raises(ValueError, match="Pass tokenizer="):
        prompt_ids(["Hello"], None)
