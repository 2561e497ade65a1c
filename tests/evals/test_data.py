"""Questions in files: formats, prompts, and what is missing, by name."""

from __future__ import annotations

import json

import pytest

from eval_data import HUMANEVAL, MMLU, PAGES, data_folder
from TIDE.evals import data
from TIDE.evals.tasks import LOCAL, check_tasks, passes_tests, value_found


@pytest.fixture
def folder(tmp_path):
    return data_folder(tmp_path)


def test_questions_have_their_values(folder):
    rows = data.gsm8k(folder, 0)
    assert rows[2] == {"prompt": "Question: Ann has 3 pens and buys 3. How many?\nAnswer:", "value": "6"}
    assert data.gsm8k(folder, 1)[2]["prompt"].startswith("Question: Ann has 1 pens and buys 1. How many?\nAnswer: 1+1=")


def test_choices_are_asked_below_examples_of_their_subject(folder):
    plain, shown = data.mmlu(folder, 0)[1], data.mmlu(folder, 1)[1]
    assert plain["answer"] == 1 and plain["prompt"] == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        "What is 1 plus 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    )
    assert "What is 0 plus 1?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: B\n\nWhat is 1 plus 1?" in shown["prompt"]


def test_pages_are_whole(folder):
    pages = [row["page"] for row in data.wikitext(folder, 0)]
    assert len(pages) == 3 and "".join(pages) == PAGES and "= = Part = =" in pages[0]


def test_the_order_is_fixed_and_mixed():
    rows = [{"n": n} for n in range(100)]
    mixed = data.shuffled(rows)
    assert mixed == data.shuffled(rows) and mixed != rows and sorted(row["n"] for row in mixed) == list(range(100))


@pytest.mark.parametrize("name", sorted(LOCAL))
def test_a_data_set_that_is_not_there_is_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*Give --data the folder that has"):
        LOCAL[name].rows(tmp_path, 0)


@pytest.mark.parametrize(
    ("name", "file", "line", "said"),
    [
        ("gsm8k", "gsm8k/test.jsonl", '{"question": "Why?"}', "line 1: .* question, answer, found none of answer"),
        ("gsm8k", "gsm8k/test.jsonl", '{"question": "Why?", "answer": "so"}', "expected a text with its value after ####"),
        ("gsm8k", "gsm8k/test.jsonl", "Why?", "line 1: .* found no JSON object"),
        ("gsm8k", "gsm8k/test.jsonl", "", "is empty"),
        ("humaneval", "humaneval/humaneval.jsonl", '{"prompt": "def f():"}', "found none of test, entry_point"),
        ("wikitext", "wikitext2/test.txt", "no heading", "expected articles below headings"),
    ],
)
def test_fields_that_a_line_lacks_are_named(folder, name, file, line, said):
    (folder / file).write_text(line)
    with pytest.raises(ValueError, match=said):
        LOCAL[name].rows(folder, 0)


def line(**changes):
    return json.dumps(MMLU[0] | changes)


@pytest.mark.parametrize(
    ("name", "file", "text", "said"),
    [
        ("gsm8k", "gsm8k/test", '{"question": ["a"], "answer": "#### 4"}', r'a text as question, found \["a"\]'),
        ("gsm8k", "gsm8k/test", '{"question": "a", "answer": 4}', "a text with its value after #### as answer, found 4"),
        ("gsm8k", "gsm8k/train", '{"question": 1, "answer": "#### 4"}', "a text as question, found 1"),
        ("humaneval", "humaneval/humaneval", '{"prompt": 3, "test": "x", "entry_point": "f"}', "a text as prompt, found 3"),
        ("humaneval", "humaneval/humaneval", '{"prompt": "p", "test": ["x"], "entry_point": "f"}', "a text as test, found"),
        ("mmlu", "mmlu/test", line(subject=3), "a text as subject, found 3"),
        ("mmlu", "mmlu/test", line(question=7), "a text as question, found 7"),
        ("mmlu", "mmlu/test", line(choices=5), "a list of 4 texts as choices, found 5"),
        ("mmlu", "mmlu/test", line(choices="abcd"), 'as choices, found "abcd"'),
        ("mmlu", "mmlu/test", line(choices=dict(a="1", b="2", c="3", d="4")), 'as choices, found {"a"'),
        ("mmlu", "mmlu/test", line(choices=[1, 2, 3, 4]), r"as choices, found \[1, 2, 3, 4\]"),
        ("mmlu", "mmlu/test", line(answer=True), "a place from 0 to 3 as answer, found true"),
        ("mmlu", "mmlu/test", line(answer=1.0), "a place from 0 to 3 as answer, found 1.0"),
        ("mmlu", "mmlu/dev", line(choices=["a", "b", "c"]), "a list of 4 texts as choices, found"),
        ("mmlu", "mmlu/dev", line(answer=7), "a place from 0 to 3 as answer, found 7"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_file_and_line(folder, name, file, text, said):
    path = folder / f"{file}.jsonl"
    path.write_text(path.read_text() + text)
    last = len(path.read_text().split("\n"))
    with pytest.raises(ValueError, match=f"{path}, line {last}: expected .*{said}.*Mend this line"):
        LOCAL[name].rows(folder, 0 if "test" in file or name == "humaneval" else 1)


def test_blank_lines_and_characters_that_end_lines_elsewhere_are_no_new_lines(folder):
    rows = [{"question": f"a{character}b", "answer": "#### 4"} for character in "\u2028\u2029\x85"]
    (folder / "gsm8k/test.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", "utf-8")
    found = data.gsm8k(folder, 0)
    assert [row["prompt"] for row in found] == [f"Question: {row['question']}\nAnswer:" for row in rows]


def test_a_title_of_one_letter_is_a_heading_and_text_above_the_first_one_is_named(folder):
    path = folder / "wikitext2/test.txt"
    path.write_text(" \n = A = \n x\n = = B = = \n y\n = C = D = \n z\n =  = \n = \n = \n")
    pages = [row["page"] for row in data.wikitext(folder, 0)]
    assert [page.split()[1] for page in pages] == ["A", "C"]
    path.write_text("an introduction\n = A = \n x\n")
    with pytest.raises(ValueError, match="expected a heading like ' = Title = ' first, found 'an introduction'"):
        data.wikitext(folder, 0)


def test_too_few_examples_are_named(folder):
    with pytest.raises(ValueError, match="expected 9 examples, found 6"):
        data.gsm8k(folder, 9)
    with pytest.raises(ValueError, match="expected 9 examples of high_school_physics, found 5"):
        data.mmlu(folder, 9)


def test_code_is_not_run_unless_asked_for(folder):
    with pytest.raises(ValueError, match="Allow it with --execute-code"):
        check_tasks(["humaneval"], folder, execute_code=False)
    check_tasks(["humaneval", "gsm8k", "arc_easy"], folder, execute_code=True)


def test_examples_where_a_task_takes_none_are_refused(folder):
    with pytest.raises(ValueError, match="task wikitext is asked without examples, found --fewshot 2"):
        check_tasks(["wikitext"], folder, execute_code=False, fewshot=2)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("so 3 + 3 = 6", 1),
        ("#### 6", 1),
        ("6 and 7", 0),
        ("#### 6 of 12", 1),
        ("it is 6.0.", 1),
        ("six", 0),
        ("", 0),
        ("-6", 0),
        ("between 10-6", 1),
        ("#### 6\n#### ...", 1),
        ("#### -6", 0),
        ("#### 6.", 1),
    ],
)
def test_an_answer_is_scored_by_its_value(said, right):
    assert value_found({"value": "6"}, [said]) == {"exact_match": right}
    assert value_found({"value": "-6"}, ["so 3 - 9 is -6"]) == value_found({"value": ".5"}, ["#### .5"]) == {"exact_match": 1}
    assert value_found({"value": "1,600"}, ["1600"]) == {"exact_match": 1}


def test_a_program_is_scored_by_its_tests():
    assert passes_tests(HUMANEVAL[1], ["\n    return a + 1\n"]) == {"pass@1": 1.0}
    assert passes_tests(HUMANEVAL[1], ["    return a\n"]) == {"pass@1": 0.0}
    assert passes_tests(HUMANEVAL[1], ["    raise SystemExit(0)\n"]) == {"pass@1": 0.0}
