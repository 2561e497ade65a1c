"""Answers in a file: what was measured stays, whatever happens to the process or the settings."""

from __future__ import annotations

import pytest

from TIDE.evals.answers import Answer, Answers, question_of

SETTINGS = {"model": "tiny", "compared": ["off", "exact"]}


def an_answer(question: str, contender: str = "off") -> Answer:
    return Answer(question, contender, ["a text", [-1.2345678901234567, True], -3.5], [[1, 2, 3]], 3, 1, 0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.answers.jsonl"


def test_answers_are_found_again_as_they_were(path):
    Answers(path, SETTINGS).keep([an_answer("q"), an_answer("q", "exact")])
    found = Answers(path, SETTINGS)
    assert len(found) == 2 and found.get("exact", "q") == an_answer("q", "exact")
    assert found.has(["off", "exact"], "q") and not found.has(["off", "fast"], "q") and not found.has(["off"], "other")


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_line_that_was_cut_off_is_dropped_and_the_rest_stays(path, cut):
    held = Answers(path, SETTINGS)
    held.keep([an_answer("first")])
    held.keep([an_answer("second")])
    path.write_bytes(path.read_bytes()[:-cut])
    again = Answers(path, SETTINGS)
    assert again.has(["off"], "first") and not again.has(["off"], "second")
    again.keep([an_answer("third")])
    last = Answers(path, SETTINGS)
    assert last.has(["off"], "first") and last.has(["off"], "third") and len(last) == 2


def test_a_file_that_was_cut_off_in_its_first_line_begins_anew(path):
    path.write_text('{"settings": {"mod')
    Answers(path, SETTINGS).keep([an_answer("q")])
    assert len(Answers(path, SETTINGS)) == 1


def test_other_settings_are_named_and_nothing_is_lost(path):
    Answers(path, SETTINGS).keep([an_answer("q")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"other settings: found compared \['off'\] instead of \['off', 'exact'\]"):
        Answers(path, SETTINGS | {"compared": ["off"]})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "said"), [("nonsense\n", "line 3 is not JSON"), ('{"question": "q"}\n', "line 3 is not an answer of this version")]
)
def test_lines_of_others_are_named(path, line, said):
    Answers(path, SETTINGS).keep([an_answer("q")])
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=said):
        Answers(path, SETTINGS)


def test_another_file_is_not_written_to(path):
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        Answers(path, SETTINGS)
    assert path.read_text() == "my notes\n"


def test_a_question_is_known_by_all_that_is_asked():
    asked = question_of("generate_until", [("Why?", {"until": ["\n"], "max_gen_toks": 8})])
    assert asked == question_of("generate_until", [["Why?", {"max_gen_toks": 8, "until": ["\n"]}]])
    assert asked != question_of("generate_until", [("Why?", {"until": ["\n"], "max_gen_toks": 9})])
    assert asked != question_of("loglikelihood", [("Why?", {"until": ["\n"], "max_gen_toks": 8})])
