"""The table of docs/configuration.md, made from `TIDEConfig`.

python docs/configuration.py            writes it into the page; a test says when that is due
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from TIDE.cli.settings import RUNNING, descriptions
from TIDE.config import SHORT_NAMES, TIDEConfig

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- the table: python docs/configuration.py -->\n", "<!-- end of the table -->\n"


def table() -> str:
    """A line for each field: what it is here, in the original system and on the command line, and what it does."""
    lines = ["| field | default | original system | option | meaning |", "|---|---|---|---|---|"]
    short = {field: name for name, field in SHORT_NAMES.items()}
    ours, original, said = TIDEConfig(), TIDEConfig.reference(), descriptions()
    for field in fields(TIDEConfig):
        name = field.name
        option = f"`--{short.get(name, name).replace('_', '-')}`" if name in RUNNING or name in short else ""
        lines.append(
            f"| `{name}` | {_value(getattr(ours, name))} | {_value(getattr(original, name))} | {option} | {said[name]} |"
        )
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


def _value(value: object) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
