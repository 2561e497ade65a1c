"""The README's code runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(import .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)  # the rest: test_docs.py


@pytest.mark.real
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_blocks_run(block, embedded, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert "Total tokens: 32" in capsys.readouterr().out


def test_every_file_of_the_package_is_in_the_tree():
    tree = (ROOT / "README.md").read_text()
    for file in (ROOT / "src" / "TIDE").rglob("*.py"):
        if file.name != "__init__.py":
            assert file.name in tree


def test_ci_runs_what_the_readme_says():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make check", "make test"]
    assert "\nmake test " in (ROOT / "README.md").read_text()
