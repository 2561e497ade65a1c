"""`tide chat`: its commands, errors that do not end it, and Ctrl-C, pressed in a real terminal."""

from __future__ import annotations

import json
import re

import pytest

import TIDE
from characters import TEMPLATE, characters
from commands import Terminal, tide
from families import build

LISTED = "/help, /reset, /save [FILE], /stats, /quit"


@pytest.fixture
def chat(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*lines: str, options: tuple[object, ...] = ()):
        return tide("chat", folder, "--no-exits", "--max-new-tokens", 8, *options, stdin="".join(f"{line}\n" for line in lines))

    return run


def answers(done) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_help_lists_the_commands(chat):
    done = chat("/help")
    assert done.exit_code == 0 and done.stderr == ""
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == ["/help", "/reset", "/save", "/stats", "/quit"]
    assert done.stdout.splitlines()[-1] == "Ctrl-C stops the current answer."


@pytest.mark.parametrize("line", ["/new", "/stop", "/", "/reset now", "/etc/passwd is what?"])
def test_another_line_with_a_slash_is_an_error_and_is_not_said_to_the_model(chat, line):
    done = chat(line, "hello", options=("--json",))
    assert [turn["prompt"] for turn in answers(done)] == ["hello"]
    assert done.stderr == (
        f"error: there is no command {line}. There are {LISTED}. Put a space before it to say it to the model.\n"
    )
    assert done.exit_code == 1, "nobody looked on, so the exit code tells"


def test_a_slash_behind_a_space_is_said_to_the_model(chat):
    done = chat(" /etc/passwd is what?", options=("--json",))
    assert [turn["prompt"] for turn in answers(done)] == ["/etc/passwd is what?"]


def test_commands_print_no_json(chat):
    done = chat("hello", "/stats", "/help", "/reset", options=("--json",))
    assert done.exit_code == 0 and len(answers(done)) == 1
    assert "Total tokens: 8" in done.stderr and "/save" in done.stderr


def test_a_conversation_is_saved_as_messages(chat, tmp_path):
    done = chat("hello", "/save", "and then", "/save", "/save own.json", "/save own.json", options=("--system", "Be brief."))
    first, again, own, over = [line for line in done.stdout.splitlines() if line.startswith("written: ")]
    assert re.fullmatch(r"written: tide-chat-\d{8}-\d{6}\.json", first) and first == again
    assert own == over == "written: own.json" and done.exit_code == 0
    messages = json.loads((tmp_path / "own.json").read_text("utf-8"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[place]["content"] for place in (0, 1, 3)] == ["Be brief.", "hello", "and then"]
    saved = json.loads((tmp_path / first.removeprefix("written: ")).read_text("utf-8"))
    assert saved == messages


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/save nowhere/talk.json", "there is no folder nowhere to write talk.json to. Make it first."),
        ("/save talk.txt", "expected a file that ends in .json, found 'talk.txt'."),
        ("/save there.json", "there is a there.json already. Give another name."),
    ],
)
def test_what_cannot_be_saved_is_a_line_and_the_chat_goes_on(chat, tmp_path, line, said):
    (tmp_path / "there.json").write_text("mine")
    done = chat("hello", line, "again", options=("--json",))
    assert done.stderr == f"error: {said}\n" and len(answers(done)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"] and (tmp_path / "there.json").read_text() == "mine"


@pytest.mark.parametrize("line", ["/save", "/stats"])
def test_before_the_first_answer_there_is_nothing_to_save_or_count(chat, line):
    done = chat(line)
    assert done.stderr.startswith("error: there is no") and done.stdout == ""


def test_an_error_while_answering_is_a_line_and_the_chat_goes_on(tmp_path):
    build("gpt2").save_pretrained(tmp_path)  # it has as many positions as it has, and no more
    characters(TEMPLATE).save_pretrained(tmp_path)
    asked = f"hello\n{'x' * 300}\nhello again\n/save {tmp_path / 'talk.json'}\n"
    done = tide("chat", tmp_path, "--no-exits", "--max-new-tokens", 8, "--json", stdin=asked)
    assert [turn["prompt"] for turn in answers(done)] == ["hello", "hello again"]
    refused, written = done.stderr.splitlines()
    assert re.match(r"error: .* \d+ tokens .*256", refused) and written == f"written: {tmp_path / 'talk.json'}"
    saved = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    assert [message["content"] for message in saved if message["role"] == "user"] == ["hello", "hello again"]


@pytest.fixture(scope="module")
def long_winded(tmp_path_factory):
    """A model with room for an answer that takes long."""
    folder = tmp_path_factory.mktemp("long")
    build("llama", max_position_embeddings=8192).save_pretrained(folder)
    characters(TEMPLATE).save_pretrained(folder)
    return folder


def test_ctrl_c_ends_the_answer_and_then_the_chat(long_winded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    terminal = Terminal("chat", long_winded, "--no-exits", "--max-new-tokens", 8000)
    terminal.wait_for("Ctrl-C stops the current answer.*> ")
    terminal.press("hello\n")
    terminal.wait_for("hello\r\n.{40}")  # it is being written
    terminal.press("\x03")
    terminal.wait_for(r"\^C.*\r\n\r\n> ")
    terminal.press("/save first.json\n")
    terminal.wait_for("written: first.json\r\n> ")
    terminal.press("and then\n")
    terminal.wait_for("and then\r\n.{40}")
    terminal.press("\x03")
    terminal.wait_for(r"\^C.*\r\n\r\n> ")
    terminal.press("/save second.json\n")
    terminal.wait_for("written: second.json\r\n> ")
    terminal.press("\x03")
    terminal.wait_for("interrupted.", again="\x03")  # Python misses a signal between the prompt and its waiting for a key
    assert terminal.exit_code() == 130

    first, second = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("first.json", "second.json"))
    assert [message["role"] for message in first] == ["user", "assistant"] and first == second[:2]
    assert [message["role"] for message in second] == ["user", "assistant"] * 2
    model, tokenizer = TIDE.load_model(long_winded)
    for turns in (1, 3):  # what was written is what the model says to what was said before, broken off answers included
        inputs = tokenizer.apply_chat_template(
            second[:turns], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=60)[0, inputs["input_ids"].shape[1] :]
        answer, full = second[turns]["content"], tokenizer.decode(ids, skip_special_tokens=True)
        assert answer and (answer.startswith(full) or full.startswith(answer))
