"""The report of a run: one page that needs nothing else, and says no more than is known."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise

import pytest

from characters import TEMPLATE, characters
from commands import tide
from families import build
from TIDE.plots.ramp import RAMP, colour
from TIDE.plots.report import report, write_report
from TIDE.run import Token


def test_a_page_needs_nothing_else_and_has_every_token(run):
    page = report(run)
    assert page.count('class="token') == len(run.tokens)
    assert "http://" not in page and "https://" not in page
    assert "What is a &lt;tide&gt;?" in page and "<tide>" not in page
    for said in ("Small-1B, mode exact", "12.3", "96.9%", "before the first layer", "draft 2", "Seconds: 2.755"):
        assert said in page, said


def test_a_page_shows_the_width_and_depth_of_trees(run):
    assert "draft trees" not in report(run)
    page = report(dataclasses.replace(run, tree_width=5.25, tree_depth=4.0))
    assert "5.2 × 4.0" in page and "mean width and depth of draft trees" in page


def test_the_words_of_a_page_are_those_of_the_field(run):
    page = report(run)
    headings = ("Prompt", "Answer, coloured by depth", "Tokens by depth", "Accepted drafts by position", "Summary")
    assert re.findall("<h2>(.*?)</h2>", page) == list(headings)
    for said in ("exited early", "mean depth, of 8 layers", "match the full model", "none (ran all layers)", "same token"):
        assert said in page, said
    for riddle in ("stood", "left early", "are the full model", "let it out", "in a row", "says"):
        assert riddle not in page, riddle


def test_a_page_of_no_tokens_claims_nothing_about_them(run):
    page = report(dataclasses.replace(run, tokens=(), acceptance_by_step={}))
    assert "(empty)" in page and "Tokens by depth" not in page
    assert "%</b>" not in page and "is different" not in page


def test_a_token_without_exits_has_no_score_and_the_page_says_why(run):
    page = report(dataclasses.replace(run, mode="exits off", tokens=(Token("Yes", 8, None, "Yes"),)))
    assert "router score\tnone (exits off)" in page and "none (ran all layers)" not in page


def test_drafts_of_mode_fast_are_not_called_accepted(run):
    assert "Accepted drafts" in report(run)
    assert "Accepted drafts" not in report(dataclasses.replace(run, mode="fast"))


def test_a_page_without_exits_says_so(run):
    page = report(dataclasses.replace(run, mode="exits off", acceptance_by_step={}))
    assert "<title>Small-1B, exits off</title>" in page and "Accepted drafts" not in page


def test_a_report_with_another_suffix_or_in_no_folder_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"a report ends in .html, found 'a.txt'"):
        write_report(run, tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_report(run, tmp_path / "missing" / "a.html")


def test_the_demo_names_its_report_in_json_too(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    characters(TEMPLATE).save_pretrained(tmp_path / "model")
    page = tmp_path / "page.html"
    asked = ("demo", "--model", tmp_path / "model", "--max-new-tokens", "4", "--rounds", "1", "--output", page)
    done = tide(*asked, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["report"] == str(page) and found["same_text"] == {"exits_off": True} and len(found["ids"]) == 4
    assert page.read_text().count('class="token') == 4


def test_colours_grow_lighter_with_depth_and_are_read_on_black():
    def light(share):
        parts = [part / 255 for part in colour(share)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    steps = [light(number / 30) for number in range(31)]
    assert all(after > before for before, after in pairwise(steps))
    assert steps[-1] / steps[0] > 2.5  # far apart in grey too
    assert (steps[0] + 0.05) / 0.05 > 4.5  # WCAG AA, in black on it as on black
    assert colour(0.0) == RAMP[0] and colour(1.0) == RAMP[-1]
