"""Hooks of the site (mkdocs.yml): files outside docs that pages link to are part of it, and docs/api.md gets its docstrings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# the engine first, then what is called before and after it
API = [
    "TIDE.engine.engine.TIDE",
    "TIDE.config.TIDEConfig",
    "TIDE.models.load.load_model",
    "TIDE.models.default.default_router",
    "TIDE.calibration.calibrate.calibrate",
    "TIDE.calibration.analyze.analyze",
    "TIDE.calibration.tune.tune",
    "TIDE.calibration.certify.certify",
    "TIDE.routing.router_file.RouterFile",
    "TIDE.routing.certificate.Certificate",
    "TIDE.routing.policy.ExitPolicy",
    "TIDE.routing.policy.Candidates",
    "TIDE.stats.ExitStats",
    "TIDE.engine.rows.row.Row",
    "TIDE.integrations.huggingface.custom_generate",
    "TIDE.integrations.huggingface.pipeline",
    "TIDE.integrations.conversation.Conversation",
    "TIDE.integrations.record.record",
    "TIDE.server.app.create_app",
]


def on_files(files: Any, config: Any) -> Any:
    """Add the examples, the changelog and the JSON of the results."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "CHANGELOG.md", content=_inside((ROOT / "CHANGELOG.md").read_text("utf-8"))))
    for example in sorted((ROOT / "examples").iterdir()):
        if example.suffix in (".py", ".ipynb"):
            files.append(File.generated(config, f"examples/{example.name}", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to the examples and the changelog lead into the site, call pages by their titles, and add what is generated."""
    titles = {file: title for title, file in _entries(config.nav)}
    markdown = re.sub(r"\[(\w+\.md)\]", lambda found: f"[{titles.get(found[1], found[1])}]", markdown)
    markdown = re.sub(r"\]\(\.\./((?:examples/)[\w.]+|CHANGELOG\.md)", r"](\1", markdown)
    if page.file.src_path == "api.md":
        markdown = markdown.replace(
            "On the site this page is made from their docstrings (`make site`); here it lists them.", ""
        )
        markdown += "\n" + "\n\n".join(f"::: {name}" for name in API) + "\n"
    if page.file.src_path == "results/README.md":
        markdown += "\n" + _listed()
    return markdown


def _entries(nav: list[Any]) -> list[tuple[str, str]]:
    """Return title and file of every page."""
    found = []
    for title, below in (pair for entry in nav for pair in entry.items()):
        found += [(title, below)] if isinstance(below, str) else _entries(below)
    return found


def _inside(text: str) -> str:
    """Return a text of the root folder with links as seen from docs."""
    return text.replace("](docs/", "](")


def _listed() -> str:
    lines = ["| file | what | hardware |", "|---|---|---|"]
    for path in sorted((ROOT / "docs" / "results").glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        lines.append(f"| [{path.stem}]({path.name}) | {found['what']} | {found['hardware']} |")
    return "\n".join(lines) + "\n"
