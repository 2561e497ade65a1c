"""The pictures of the docs: those that docs/pictures.py makes, small, and without anything from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted((DOCS / "pictures").iterdir())


def test_the_script_makes_all_of_them():
    said = (DOCS / "pictures.py").read_text("utf-8").split('"""')[1]
    assert {picture.name for picture in PICTURES} == set(re.findall(r"[\w-]+\.(?:png|svg)", said))


def test_they_are_small_and_need_nothing_else():
    for picture in PICTURES:
        assert picture.stat().st_size < 200_000, picture.name
    drawn = (DOCS / "pictures" / "demo.svg").read_text("utf-8")
    assert "url(http" not in drawn and "same text yes" in drawn.replace("&#160;", " ")
