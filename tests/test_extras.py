"""Install commands in errors: the packages of `pyproject.toml`, and nowhere the name that is another release on the index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from TIDE.extras import PACKAGES, install_command

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
SUFFIXES = (".py", ".md", ".ipynb")


def test_a_command_installs_the_packages_of_its_extra():
    assert {extra: EXTRAS[extra] for extra in PACKAGES} == PACKAGES
    assert install_command("datasets") == "pip install 'datasets>=3'"
    assert install_command("serve").startswith("pip install 'fastapi>=0.133' 'uvicorn>=0.30' ")


def test_no_page_and_no_message_installs_another_package():
    folders = [ROOT / name for name in ("src", "docs", "examples", "tests", "benchmarks")]
    texts = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES)]
    named = [path.name for path in texts if re.search(r"pip install[^`\n]*tide-inference", path.read_text("utf-8"))]
    assert set(named) <= {"extras.py", "test_extras.py"}
