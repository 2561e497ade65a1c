"""`tide chat`: its commands, errors that do not end it, and Ctrl-C, pressed in a real terminal."""

from __future__ import annotations

import json
import re

import pytest

import TIDE
from characters import TEMPLATE, characters
from commands import Terminal, tide
from families import build

LISTED = "/help, /set [NAME VALUE], /system [TEXT], /regenerate, /undo, /reset, /save [FILE], /load FILE, /stats, /exit"


PROMPT = "\r\n> "
LEAVE = f"To leave: /exit or Ctrl-D, or Ctrl-C again.{PROMPT}"
NOTHING = (
    "\x05"  # to the end of the line: Python misses a signal between its prompt and its waiting for a key until there is one
)


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
    *commands, several_lines, ctrl_c = done.stdout.splitlines()
    assert [line.split()[0] for line in commands] == [name.split()[0] for name in LISTED.split(", ")]
    assert '"""' in several_lines and ctrl_c == "Ctrl-C stops the current answer."


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
def test_a_chat_that_cannot_be_saved_goes_on(chat, tmp_path, line, said):
    (tmp_path / "there.json").write_text("mine")
    done = chat("hello", line, "again", options=("--json",))
    assert done.stderr == f"error: {said}\n" and len(answers(done)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"] and (tmp_path / "there.json").read_text() == "mine"


@pytest.mark.parametrize("line", ["/save", "/stats", "/undo", "/regenerate"])
def test_before_the_first_answer_there_is_nothing_to_save_count_or_take_back(chat, line):
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


@pytest.fixture
def terminal(long_winded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def start(*options: object) -> Terminal:
        found = Terminal("chat", long_winded, "--no-exits", *options)
        found.wait_for(f"Ctrl-C stops the current answer.*{PROMPT}")
        return found

    return start


def test_ctrl_c_ends_the_answer_and_not_the_chat(long_winded, tmp_path, terminal):
    chat = terminal("--max-new-tokens", 8000)
    for number, said in enumerate(("hello", "and then")):
        chat.press(f"{said}\n")
        chat.wait_for(f"{said}\r\n.{{40}}")  # it is being written
        chat.press("\x03")
        chat.wait_for(f" tokens/s.*{PROMPT}")
        chat.press(f"/save {number}.json\n")
        chat.wait_for(f"written: {number}.json{PROMPT}")
    chat.press("/exit\n")
    assert chat.exit_code() == 0

    first, second = (json.loads((tmp_path / f"{number}.json").read_text("utf-8")) for number in range(2))
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


@pytest.mark.full
def test_ctrl_c_at_the_prompt_says_how_to_leave_and_a_second_one_leaves(terminal):
    chat = terminal("--max-new-tokens", 8)
    chat.press("\x03")
    chat.wait_for(LEAVE, again=NOTHING)
    chat.press("typed")
    chat.wait_for("typed")
    chat.press("\x03")  # drops the line, and is not the second one
    chat.wait_for(PROMPT, again=NOTHING)
    chat.press("hello\n")
    chat.wait_for("cut at 8 tokens")
    chat.press("\x03")  # meant for the answer, which has just ended
    chat.wait_for("> ")
    chat.press("\n/undo\n")
    chat.wait_for(f"taken back: hello{PROMPT}")
    chat.press("\x03")
    chat.wait_for(LEAVE, again=NOTHING)
    chat.press("\x03")
    chat.wait_for("interrupted.", again=NOTHING)
    assert chat.exit_code() == 130


@pytest.mark.full
def test_keys_pressed_while_an_answer_is_written_are_read_afterwards_and_not_shown_in_it(terminal):
    chat = terminal("--max-new-tokens", 400)
    chat.press("hello\n")
    chat.wait_for("hello\r\n.{40}")
    chat.press("/help")
    written = chat.wait_for("cut at 400 tokens")
    assert "/help" not in written
    chat.wait_for("> /help")
    chat.press("\n")
    chat.wait_for(f"show these commands.*{PROMPT}")


def test_after_an_answer_its_figures_are_one_line(folder, router):
    done = tide("chat", folder, "--router", router, "--max-new-tokens", 8, stdin="hello\n")
    figures, cut = done.stderr.splitlines()
    assert re.fullmatch(r"8 tokens, [\d.]+ tokens/s, mean depth [\d.]+ of 4 layers", figures)
    assert cut == "cut at 8 tokens. /set max_new_tokens 16 makes room for longer answers."
    assert "Total tokens" not in done.stdout


def test_a_message_of_several_lines_stands_between_three_quotes(chat):
    done = chat('"""one', "/two", '"""', '"""three"""', '"""four', options=("--json",))
    assert [turn["prompt"] for turn in answers(done)] == ["one\n/two", "three", "four"]


def test_the_system_prompt_can_be_set_and_removed(chat, tmp_path):
    done = chat("/system Be brief.", "hello", "/save with.json", "/system", "/save without.json", options=("--system", "Be."))
    assert done.exit_code == 0
    with_system, without = (json.loads((tmp_path / name).read_text("utf-8")) for name in ("with.json", "without.json"))
    assert with_system == [{"role": "system", "content": "Be brief."}, *without] and len(without) == 2


def test_a_chat_that_was_saved_goes_on(chat):
    talked = answers(chat("one", "two", "/save talk.json", "three", options=("--json", "--system", "Be brief.")))
    (went_on,) = answers(chat("/load talk.json", "three", options=("--json",)))
    assert went_on["answer"] == talked[2]["answer"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file talk.json. Give one that /save wrote."),
        ("{", "talk.json is no chat"),
        ("[1]", "talk.json is no chat"),
        ("[]", "talk.json is no chat"),
        ('[{"role": "user", "content": "hi"}]', "talk.json is no chat"),
        ('[{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}]', "talk.json is no chat"),
    ],
)
def test_a_file_without_a_chat_is_not_loaded_and_the_chat_stays(chat, tmp_path, text, said):
    if text is not None:
        (tmp_path / "talk.json").write_text(text)
    done = chat("one", "/load talk.json", "two", options=("--json",))
    assert done.stderr.startswith(f"error: {said}") and len(done.stderr.splitlines()) == 1
    assert [turn["answer"] for turn in answers(done)] == [
        turn["answer"] for turn in answers(chat("one", "two", options=("--json",)))
    ]


def test_a_command_without_its_argument_is_shown(chat):
    assert chat("/load").stderr == "error: expected /load FILE, found /load.\n"


def test_a_turn_taken_back_leaves_no_trace(chat):
    found = answers(chat("one", "two", "/undo", "three", options=("--json",)))
    expected = answers(chat("one", "three", options=("--json",)))
    assert [found[place]["answer"] for place in (0, 2)] == [turn["answer"] for turn in expected]


def test_an_answer_is_written_again_with_the_next_seed_and_takes_the_place_of_the_old_one(chat, tmp_path):
    drawn = ("--temperature", 1, "--seed", 5, "--json")
    first, again, other = answers(chat("one", "/regenerate", "/regenerate", "/save talk.json", options=drawn))
    assert [turn["seed"] for turn in (first, again, other)] == [5, 6, 7]
    assert len({turn["answer"] for turn in (first, again, other)}) == 3 and again["prompt"] == "one"
    messages = json.loads((tmp_path / "talk.json").read_text("utf-8"))
    assert [message["content"] for message in messages] == ["one", other["answer"]]


def test_settings_are_shown_and_set_within_a_chat(chat):
    done = chat(
        "/set", "/set temperature 1", "/set top-k 3", "/set seed 5", "/set max_new_tokens 5", "one", "/set seed", "/set"
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["temperature", "0.0"] in lines and ["seed", "unset"] in lines and ["max_new_tokens", "8"] in lines
    assert ["temperature", "1.0"] in lines and ["seed", "5"] in lines and done.stderr.startswith("5 tokens")
    (set_inside,) = answers(chat("/set temperature 1", "/set top_k 3", "/set seed 5", "one", options=("--json",)))
    (given,) = answers(chat("one", options=("--temperature", 1, "--top-k", 3, "--seed", 5, "--json")))
    assert set_inside["answer"] == given["answer"] and set_inside["seed"] == 5


def test_quotation_marks_around_a_value_are_no_part_of_it(chat):
    lines = [line.split(maxsplit=1) for line in chat('/set stop ". "', "/set").stdout.splitlines()]
    assert ["stop", "['. ']"] in lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set heat 3", "there is no setting heat. There are max_new_tokens, temperature, top_p,"),
        ("/set top_p 3", "top_p must be above 0 and at most 1, found 3.0."),
        ("/set seed x", "seed must be an integer, found 'x'."),
        ("/set ignore_eos maybe", "ignore_eos must be on or off, found 'maybe'."),
    ],
)
def test_a_setting_that_cannot_be_is_refused_and_the_old_one_stays(chat, line, said):
    done = chat(line, "one", options=("--json",))
    assert done.stderr.startswith(f"error: {said}") and len(answers(done)) == 1
