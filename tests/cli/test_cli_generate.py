"""`tide generate`, `tide chat` and `tide bench` on a tiny model: what they print, and a line where something is wrong."""

from __future__ import annotations

import json

import pytest

import TIDE
from characters import characters
from commands import tide
from families import build
from TIDE.cli.colours import Pieces, painted
from TIDE.plots.ramp import colour
from TIDE.run import prepared

COMMON = {"generate": ("generate", "hello", "--model"), "chat": ("chat",)}


def expected(folder, prompt, **options):
    model, tokenizer = TIDE.load_model(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, **options)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_an_answer_is_printed_as_the_model_would_write_it(folder, router):
    done = tide("generate", "hello", "--model", folder, "--router", router, "--max-new-tokens", "12")
    assert done.exit_code == 0, done.output
    assert done.stdout.rstrip("\n") == expected(folder, "hello", max_new_tokens=12).rstrip("\n")


def test_prompts_come_from_a_file_or_standard_input(folder, tmp_path):
    (tmp_path / "asked.txt").write_text("one\n\ntwo\n")
    (tmp_path / "asked.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    common = ("--model", folder, "--no-exits", "--max-new-tokens", "4", "--json")
    for given in (("--file", tmp_path / "asked.txt"), ("--file", tmp_path / "asked.jsonl")):
        done = tide("generate", *given, *common)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert [one["prompt"] for one in found] == ["one", "two"], done.output
    for dash in ((), ("-",)):
        piped = tide("generate", *dash, *common, stdin="three\n\nfour\n")
        found = json.loads(piped.stdout)
        assert found["prompt"] == "three\n\nfour", "all of it is one prompt"
        assert found["answer"] == expected(folder, "three\n\nfour", max_new_tokens=4)
        assert found["tokens"] == len(found["depths"]) == 4 and found["tokens_per_second"] > 0


def test_depths_are_coloured_and_explained(folder, router, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = tide("generate", "hello", "--model", folder, "--router", router, "--max-new-tokens", "12", "--depth")
    assert done.exit_code == 0, done.output
    assert "\x1b[48;2;{};{};{}m".format(*colour(1.0)) in done.stdout
    assert "all 4 layers" in done.stdout and "Total tokens: 12" in done.stdout


@pytest.mark.parametrize("line", ["[1]", "{}", "{", '{"prompt": 3}'])
def test_a_line_that_holds_no_prompt_is_shown(line, tmp_path):
    (tmp_path / "asked.jsonl").write_text(f'{{"prompt": "one"}}\n{line}\n')
    done = tide("generate", "--file", tmp_path / "asked.jsonl")
    assert done.exit_code == 2
    assert "expected an object with 'prompt' or 'turns' a line" in done.stderr and f"found '{line}'" in done.stderr


def test_no_prompt_at_all_is_wrong_usage():
    done = tide("generate", stdin="\n")
    assert done.exit_code == 2 and "expected a prompt in standard input, found none." in done.stderr


def shown(run: TIDE.Run) -> str:
    return "".join(token.text for token in run.tokens if not token.special).strip()


def test_a_run_becomes_a_page(folder, router, tmp_path):
    asked = ("generate", "<hello>", "--model", folder, "--router", router, "--max-new-tokens", "12")
    done = tide(*asked, "--temperature", "1.0", "--seed", "5", "--raw", "--save", tmp_path / "drawn.json")
    drawn = TIDE.Run.load(tmp_path / "drawn.json")
    assert shown(drawn) in done.stdout
    done = tide(*asked, "--save", tmp_path / "run.json")
    assert done.exit_code == 0 and f"written: {tmp_path / 'run.json'}" in done.stderr
    run = TIDE.Run.load(tmp_path / "run.json")
    assert len(run.tokens) == 12 and run.agreement == 1.0  # mode exact
    assert {token.depth for token in run.tokens} <= {2, 4}
    assert all(token.score is not None for token in run.tokens if token.depth == 2)
    assert shown(run) == done.stdout.strip()  # drawn or not, it is what was shown
    done = tide("report", tmp_path / "run.json", "--figures", tmp_path / "figures", "--json")
    written = json.loads(done.stdout)
    assert written[0] == str(tmp_path / "run.html") and len(written) == 4
    page = (tmp_path / "run.html").read_text()
    assert page.count('class="token') == 12 and "&lt;hello&gt;" in page and "<hello>" not in page
    assert "http://" not in page and "https://" not in page  # it needs nothing else


def test_a_seed_is_a_text_with_exits_and_without(folder, router):
    asked = ("generate", "hello", "--model", folder, "--max-new-tokens", "12", "--temperature", "1.0", "--json")
    runs = [("--seed", "5", "--router", router), ("--seed", "5", "--no-exits"), ("--seed", "6", "--no-exits")]
    found = [json.loads(tide(*asked, *own).stdout) for own in runs]
    assert [own["seed"] for own in found] == [5, 5, 6]
    assert found[0]["answer"] == found[1]["answer"] != found[2]["answer"]


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.8),
        dict(presence_penalty=2.0),
        dict(frequency_penalty=1.5),
        dict(temperature=1.0, seed=4),
        dict(temperature=1.0, seed=4, top_p=0.3),
        dict(temperature=1.0, seed=4, top_k=2),
        dict(temperature=1.0, seed=4, min_p=0.9),
    ],
)
def test_options_of_an_answer_are_those_of_the_engine(command, options, folder):
    model, tokenizer = TIDE.load_model(folder)
    inputs = prepared(tokenizer, "hello")
    answers = []
    with TIDE.TIDE(model) as engine:
        for own in (options, {name: value for name, value in options.items() if name in ("temperature", "seed")}):
            ids = engine.generate(**inputs, max_new_tokens=24, do_sample="temperature" in own, **own)
            answers.append(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    done = tide(*COMMON[command], folder, "--no-exits", "--max-new-tokens", 24, "--json", *given, stdin="hello\n")
    assert json.loads(done.stdout)["answer"] == answers[0]
    assert len(options) == 2 or answers[0] != answers[1], "the option has an effect here"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_ends_before_the_first_stop_string(command, folder):
    text = expected(folder, "hello", max_new_tokens=24)
    asked = (*COMMON[command], folder, "--no-exits", "--max-new-tokens", 24, "--stop", text[9:12], "--stop", "never")
    done = json.loads(tide(*asked, "--json", stdin="hello\n").stdout)
    assert done["answer"] == text[: text.index(text[9:12])] and done["finish_reason"] == "stop"
    assert done["tokens"] == len(done["depths"]) < 24
    shown = tide(*asked, stdin="hello\n")
    assert shown.stdout.strip() == done["answer"].strip() and "cut" not in shown.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_says_whether_an_end_token_or_a_limit_ended_it(command, folder, tmp_path):
    model, tokenizer = TIDE.load_model(folder)
    inputs = prepared(tokenizer, "hello")
    model.generation_config.eos_token_id = int(model.generate(**inputs, do_sample=False, max_new_tokens=9)[0, -1])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    asked = (*COMMON[command], tmp_path, "--no-exits", "--max-new-tokens", 24)
    ended, went_on = (json.loads(tide(*asked, "--json", *own, stdin="hello\n").stdout) for own in ((), ("--ignore-eos",)))
    assert (ended["finish_reason"], went_on["finish_reason"]) == ("stop", "length")
    assert ended["tokens"] <= 9 and went_on["tokens"] == 24 and went_on["answer"].startswith(ended["answer"])
    assert "cut" not in tide(*asked, stdin="hello\n").stderr
    assert "cut at 24 tokens. " in tide(*asked, "--ignore-eos", stdin="hello\n").stderr


def test_a_system_prompt_comes_before_the_prompt(folder, tmp_path):
    model, tokenizer = TIDE.load_model(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
    asked = ("generate", "hello", "--no-exits", "--max-new-tokens", 12, "--json", "--system", "Be brief.", "--model")
    assert json.loads(tide(*asked, folder).stdout)["answer"] == tokenizer.decode(ids, skip_special_tokens=True)
    model.save_pretrained(tmp_path)
    characters(None).save_pretrained(tmp_path)
    done = tide(*asked, tmp_path)
    assert done.exit_code == 1 and "a system prompt goes into a chat template, and there is none here." in done.stderr


def test_a_run_that_a_stop_string_ended_is_saved_up_to_it(folder, router, tmp_path):
    text = expected(folder, "hello", max_new_tokens=24)
    asked = ("generate", "hello", "--model", folder, "--router", router, "--max-new-tokens", 24, "--stop", text[9:12])
    done = tide(*asked, "--save", tmp_path / "run.json", "--depth")
    assert done.exit_code == 0, done.stderr
    assert shown(TIDE.Run.load(tmp_path / "run.json")).startswith(text[: text.index(text[9:12])].strip())


def test_a_chat_answers_each_turn_in_view_of_those_before(folder, router):
    asked = ("chat", folder, "--router", router, "--max-new-tokens", 8, "--json")
    done = tide(*asked, stdin="hello\nand then\n/reset\nhello\n/quit\nnever\n")
    assert done.exit_code == 0, done.output
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert [turn["prompt"] for turn in turns] == ["hello", "and then", "hello"]
    assert turns[0]["answer"] == turns[2]["answer"] == expected(folder, "hello", max_new_tokens=8)


def test_a_chat_needs_a_chat_template(tmp_path):
    build("llama").save_pretrained(tmp_path)
    characters(None).save_pretrained(tmp_path)
    done = tide("chat", tmp_path, "--no-exits", stdin="hello\n")
    assert done.exit_code == 1 and "has no chat template. Use tide generate --raw" in done.stderr


def test_bench_times_three_ways_on_the_same_prompts(folder, router):
    asked = ("bench", "hello", "again", "--model", folder, "--router", router, "--max-new-tokens", "6", "--rounds", "2")
    table = tide(*asked).stdout
    titles = ["model.generate", "TIDE, exits off", "TIDE, exact"]
    assert [line.partition("  ")[0] for line in table.splitlines()[1:4]] == titles and table.count("2 of 2") == 3


def test_characters_of_several_tokens_come_with_the_last_of_them(folder):
    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode("utf-8", "replace")

    pieces = Pieces(Bytes())
    assert [pieces.add(byte) for byte in "aé✓".encode()] == ["a", "", "é", "", "", "✓"]


def test_colours_go_from_shallow_to_deep_and_can_be_left_out(monkeypatch):
    assert colour(0.0) != colour(0.5) != colour(1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    ground = "\x1b[48;2;{};{};{}m".format(*colour(0.5))
    shown = painted("two\n\nlines", 2, 4)
    assert [ground in line for line in shown.split("\n")] == [True, False, True] and ground + "\x1b[0m" not in shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("word", 0, 4) == "[word]" and painted("word", 4, 4) == "word"
