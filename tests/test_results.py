"""Figures in README and docs have sources in docs/results (`make check`); one that is altered or has none is noticed."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from families import FAMILIES as variants
from TIDE.adapters.table import FAMILIES

ROOT = Path(__file__).parent.parent
TOOL = runpy.run_path(str(ROOT / "docs" / "check_results.py"))
check = TOOL["check"]


EXACT = "<!-- results: exact-h200 -->\n| | exact |\n|---|---|\n"
TWO = "<!-- results: exact-arm:all exact-h200:all -->\n| | exact |\n|---|---|\n"
LABEL = "<!-- results: exact-arm:all -->\n| | exact |\n|---|---|\n| {} | 30.0 |\n"
CELL = "<!-- results: reproduction-speed -->\n| | batch 1 |\n|---|---|\n| exact / exits off, embedded model, H200 | {} |\n"
PRINTED = "<!-- results: eval-gsm8k --> <!-- settings: 95 -->\n\n```text\n{}\n\n(95 %)\n```\n"
ROW = "fast   1.0%  +0.0% (-2.2% to +2.2%)  199 of 200   24.8  0.62 (0.60 to 0.64)   3.1%    895.3"
WITH_SOURCES = [
    "It is 1.25 times as fast, at 30,001 tok/s. <!-- settings: 1.25 30001 -->",
    "Python 3.11, transformers 5.17.0, `--risk 0.05`, licence Apache-2.0, 12 layers.",
    "3 of 4 texts, 7 %. <!-- settings: 3 4 7 -->",
    "Three of four rows, 12 layers and 3 seeds.",
    CELL.format(2.35),
    EXACT + "| coding | 2,778 |\n",
    TWO + "| one | 30.0 |\n| two | 2,022 |",
    "Drafts: 21,848. <!-- results: exact-arm.drafted -->",
    "Of these 2.3 % left. <!-- results: eval-mmlu:fast:exits,_% -->",
    LABEL.format("240 Spec-Bench prompts, 2 Arm cores"),
    "<!-- settings: 2400 64 --> " + LABEL.format("2400 Spec-Bench prompts, 2 Arm cores"),
    "<!-- settings: 2400 64 --> " + LABEL.format("240 Spec-Bench prompts, 64 Arm cores"),
    PRINTED.format(ROW),
    "```python\nx = 1.25\n```\n",
]
WITHOUT = [
    "It is 1.25 times as fast.",
    "| a | b |\n|---|---|\n| x | 1.25 |",
    *("It saves 7 % of it.", "It takes 71% longer.", "3 of 4 were right.", "After 5 s it ends.", "At 66 tok/s.", "It is 9 ms."),
    CELL.format(2.36),
    EXACT + "| coding | 2,779 |\n",
    EXACT + "| coding | 2,385 |\n",  # a number of another row
    EXACT + "| cooking | 2,778 |\n",
    EXACT.replace("exact |", "exact, more or less |") + "| coding | 2,778 |\n",
    TWO + "| one | 1,621 |\n| two | 30.0 |",
    "Drafts: many. <!-- results: exact-arm.drafted -->",
    "Of these 2.4 % left. <!-- results: eval-mmlu:fast:exits,_% -->",
    LABEL.format("2400 Spec-Bench prompts, 2 Arm cores"),
    LABEL.format("240 Spec-Bench prompts, 64 Arm cores"),
    *(PRINTED.format(ROW.replace(*other)) for other in (("-2.2", "+2.2"), ("fast", "exact"), ("fast", "slow"))),
    PRINTED.format(ROW).replace("<!-- results: eval-gsm8k -->", ""),
]


def test_figures_with_a_source_are_taken_and_all_others_noticed():
    assert [text for text in WITH_SOURCES if check(text)] == []
    assert [text for text in WITHOUT if not check(text)] == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("exact-arm.dreamt", "no figure 'dreamt'"),
        ("nowhere.drafted", "there is no docs/results/nowhere"),
        ("eval-mmlu:fast:entries,_%", "eval-mmlu.json has no row 'fast' with 'entries, %'"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, said):
    with pytest.raises(KeyError, match=said):
        check(f"Drafts: 21,848. <!-- results: {source} -->")


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/studies.md", "docs/when_tide_does_not_help.md"])
def test_an_altered_figure_is_noticed(page):
    """Each number of each marked table and paragraph, one at a time."""
    altered = 0
    for block, marks in TOOL["_blocks"]((ROOT / page).read_text("utf-8")):
        comments = "".join(f"<!-- {kind}: {names} -->" for kind, names in marks)
        if "<!-- results" not in comments or block.startswith("```"):  # what was printed has a test of its own
            continue
        shown = re.sub(r"<!--.*?-->", "", block, flags=re.DOTALL)
        for found in re.finditer(r"(?<=[ (|–*~])\d[\d,]*\.\d+(?=[ )|%–,*;:]|\.\s|$)", shown):
            if found[0] in TOOL["numbers"](shown):
                other = found[0][:-1] + str((int(found[0][-1]) + 1) % 10)
                assert check(f"{comments}\n{shown[: found.start()]}{other}{shown[found.end() :]}"), (found[0], block)
                altered += 1
    assert altered > (100 if "benchmarks" in page else 5)


def test_an_altered_number_of_what_a_command_printed_is_noticed():
    """Every number with a decimal point, a sign or a unit in every printed block of these pages, one at a time."""
    altered = 0
    for page in ("README.md", "docs/evaluation.md"):
        for block, marks in TOOL["_blocks"]((ROOT / page).read_text("utf-8")):
            comments = "".join(f"<!-- {kind}: {names} -->" for kind, names in marks)
            if not block.startswith("```text") or "results" not in comments:
                continue
            for found in re.finditer(r"(?<=[ (+-])\d[\d.]*\d(?=[ ,)%])|\d+(?= of )|(?<= of )\d+", block):
                other = found[0][:-1] + str((int(found[0][-1]) + 1) % 10)
                assert check(f"{comments}\n\n{block[: found.start()]}{other}{block[found.end() :]}\n```\n"), (found[0], block)
                altered += 1
    assert altered > 150


@pytest.mark.parametrize(("said", "other"), [("93 MB", "13 MB"), ("540 MB", "940 MB"), ("2 Arm cores", "64 Arm cores")])
def test_altered_sizes_in_the_readme_are_noticed(said, other):
    text = (ROOT / "README.md").read_text("utf-8")
    assert said in text and check(text.replace(said, other)) != []


def test_every_source_says_how_it_was_measured_and_is_quoted():
    pages = "".join(page.read_text("utf-8") for page in TOOL["PAGES"])
    for path in sorted(TOOL["RESULTS"].glob("*.json")):
        found = TOOL["source"](path.stem)
        assert found["command"] and found["hardware"] and ("table" in found or "figures" in found), path.name
        assert re.search(rf"results:[^>]*\b{re.escape(path.stem)}\b", pages), f"{path.name} is quoted nowhere"
        assert json.loads(path.read_text("utf-8")) == found


def test_families_are_counted_as_the_tables_have_them():
    for page in TOOL["PAGES"]:
        text = page.read_text("utf-8")
        for pattern, count in ((r"(\d+) (?:model )?families", len(FAMILIES)), (r"(\d+) variants", len(variants))):
            assert {int(found) for found in re.findall(pattern, text)} <= {count}, page.name
        assert page.name != "README.md" or len(re.findall(r"\d+ (?:model )?families", text)) == 2
