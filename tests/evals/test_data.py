"""Questions in files: formats, prompts, and what is missing, by name."""

from __future__ import annotations

import pytest

from eval_data import HUMANEVAL, PAGES, data_folder
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
        (
            "gsm8k",
            "gsm8k/test.jsonl",
            '{"question": "Why?"}',
            "line 1: .* question, answer, found none of answer",
        ),
        ("gsm8k", "gsm8k/test.jsonl", '{"question": "Why?", "answer": "so"}', "expected an answer with its value after ####"),
        ("gsm8k", "gsm8k/test.jsonl", "Why?", "line 1: .* found no JSON object"),
        ("gsm8k", "gsm8k/test.jsonl", "", "is empty"),
        ("mmlu", "mmlu/test.jsonl", '{"subject": "x", "question": "?", "choices": ["a"], "answer": 0}', "expected 4 choices"),
        ("humaneval", "humaneval/humaneval.jsonl", '{"prompt": "def f():"}', "found none of test, entry_point"),
        ("wikitext", "wikitext2/test.txt", "no heading", "expected articles below headings"),
    ],
)
def test_what_a_line_lacks_is_named(folder, name, file, line, said):
    (folder / file).write_text(line)
    with pytest.raises(ValueError, match=said):
        LOCAL[name].rows(folder, 0)


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
    ],
)
def test_an_answer_is_scored_by_its_value(said, right):
    assert value_found({"value": "6"}, [said]) == {"exact_match": right}
    assert value_found({"value": "1,600"}, ["1600"]) == {"exact_match": 1}


def test_a_program_is_scored_by_its_tests():
    assert passes_tests(HUMANEVAL[1], ["\n    return a + 1\n"]) == {"pass@1": 1.0}
    assert passes_tests(HUMANEVAL[1], ["    return a\n"]) == {"pass@1": 0.0}
    assert passes_tests(HUMANEVAL[1], ["    raise SystemExit(0)\n"]) == {"pass@1": 0.0}
