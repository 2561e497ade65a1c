"""A router file as text: a summary for the terminal, a model card for the Hub.

Measured figures are values by name, and lists of rows, which become tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from huggingface_hub import ModelCardData

from TIDE.routing.fingerprint import Fingerprint

LIBRARY = "tide-inference"
ORIGIN = ("origin", "source", "tried")  # facts of a head that others have trained
Row = dict[str, Any]

CARD = """---
{data}
---

# {title}

A router file for TIDE (package `tide-inference`): exit heads and routers that let easy tokens of a frozen
causal LM exit before its last layer. The model itself is not included.

Made for **{model}**. It runs with that model only: the file holds a fingerprint of its weights.

```python
import TIDE
from huggingface_hub import hf_hub_download

model, tokenizer = TIDE.load_model("{source}")
router = hf_hub_download("{repo_id}", "router.safetensors")
inputs = tokenizer("The sea is", return_tensors="pt").to(model.device)
with TIDE.TIDE(model, router) as engine:  # mode "exact": the text stays the model's
    print(tokenizer.decode(engine.generate(**inputs, max_new_tokens=64)[0]))
    print(engine.last_stats.summary())
```
"""


def summary_text(values: Row, others: dict[str, Row]) -> str:
    """Return everything in a file except its tensors, as text.

    Args:
        values: of `RouterFile.as_dict`.
        others: values of the file's other parts, by title.
    """
    lines = _pairs(_head(values))
    lines += ["", "exits", *_indented(_aligned(_exit_rows(values)))]
    for name in ("config", "facts", "figures", "certificate"):
        plain, tables = _sorted_out(_certified(values) if name == "certificate" else values[name])
        if plain:
            lines += ["", name, *_indented(_pairs(plain))]
        if name == "figures":
            tables |= _exit_tables(values)
        for title, rows in tables.items():
            lines += ["", title, *_indented(_aligned(rows))]
    for part, held in others.items():
        plain, tables = _sorted_out(held)
        lines += ["", part, *_indented(_pairs(plain))]
        for title, rows in tables.items():
            lines += ["", title, *_indented(_aligned(rows))]
    return "\n".join(lines)


def brief_text(values: Row, others: dict[str, Row]) -> str:
    """Return what a user of a file has to know, as text."""
    origin = {name: values["facts"][name] for name in ORIGIN if name in values["facts"]}
    lines = [*_pairs(_head(values) | origin | _speedup(values)), "", "exits", *_indented(_aligned(_exit_rows(values)))]
    if certified := _certified(values):
        lines += ["", "certificate", *_indented(_pairs(_sorted_out(certified)[0]))]
    for part, held in others.items():
        lines += ["", part, *_indented(_pairs(_sorted_out(held)[0]))]
    return "\n".join([*lines, "", "configuration, training facts and all figures: --all"])


def card_text(values: Row, others: dict[str, Row], repo_id: str | None = None, base_model: str | None = None) -> str:
    """Return the model card of a file.

    Args:
        others: values of its other parts, by title.
        repo_id: hub id of the repository for the file.
        base_model: hub id of the model it is for.
    """
    made_for = _made_for(values)
    name = made_for.name if made_for else ""
    tags = ["early-exit", "speculative-decoding", "text-generation", "tide"]
    data = ModelCardData(license="apache-2.0", library_name=LIBRARY, tags=tags, base_model=base_model)
    text = CARD.format(
        data=data.to_yaml(),
        title=f"TIDE routers for {name or 'a causal LM'}",
        model=made_for.describe() if made_for else "a model the file does not name",
        source=base_model or name or "MODEL",
        repo_id=repo_id or "USER/NAME",
    )
    sections = {"Contents": _named(_head(values)), "Exits": _exit_rows(values)}
    for title in ("figures", "facts", "config"):
        plain, tables = _sorted_out(values[title])
        sections |= {title: _named(plain)} | tables
    sections |= _exit_tables(values)
    plain, tables = _sorted_out(_certified(values))
    sections |= {"certificate": _named(plain)} | tables
    for part, held in others.items():
        plain, tables = _sorted_out(held)
        sections |= {part: _named(plain)} | tables
    for title, rows in sections.items():
        if rows:
            text += f"\n## {title[0].upper()}{title[1:]}\n\n" + "\n".join(_markdown(rows)) + "\n"
    return text


def _speedup(values: Row) -> Row:
    """Return the speedup that calibration expected, and the machine it holds for."""
    if (speedup := values["figures"].get("expected_speedup")) is None:
        return {}
    return {"expected speedup": f"{_shown(speedup)} on {values['facts'].get('machine') or 'the machine of calibration'}"}


def _made_for(values: Row) -> Fingerprint | None:
    return None if values["fingerprint"] is None else Fingerprint(**values["fingerprint"])


def _head(values: Row) -> Row:
    exits, made_for = values["exits"], _made_for(values)
    every = "" if len(values["checkpoints"]) == len(exits) else f" (of {_listed(exits)})"
    vocabulary = "all tokens"
    if (count := values["vocabulary"]) is not None:
        vocabulary = f"{count}" + (f" of {made_for.vocab_size}" if made_for else "") + " tokens"
    return {
        "model": made_for.describe() if made_for else "not named in the file",
        "made by": f"{LIBRARY} {values['version']}",
        "strategy": values["strategy"],
        "heads": _each(at["sizes"] for at in exits.values()),
        "routers": _each(at["router"] for at in exits.values()) or "none: a draft's own probability is its score",
        "checkpoints": (_listed(values["checkpoints"]) or "none in use") + every,
        "draft length": values["max_pending"],
        "vocabulary": vocabulary,
    }


def _certified(values: Row) -> Row:
    """Return the certificate for display; empty if there is none."""
    if values["certificate"] is None:
        return {}
    held = dict(values["certificate"])
    if held["threshold"] is None:
        held["threshold"] = "never exit"
    return held | {"thresholds tested": held.pop("tested")}


def _named(values: Row) -> list[Row]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _exit_rows(values: Row) -> list[Row]:
    rows = []
    for depth, at in values["exits"].items():
        figures, _ = _sorted_out(at["figures"])
        in_use = "yes" if int(depth) in values["checkpoints"] else "no"
        rows.append({"depth": int(depth), "in use": in_use, "threshold": at["threshold"]} | figures)
    return rows


def _exit_tables(values: Row) -> dict[str, list[Row]]:
    found = {depth: _sorted_out(at["figures"])[1] for depth, at in values["exits"].items()}
    return {f"{name} at depth {depth}": rows for depth, tables in found.items() for name, rows in tables.items()}


def _each(sizes: Iterable[Row]) -> str:
    """Return the sizes of several modules as text, equal ones once; sizes of zero are left out."""
    said = [", ".join(f"{name} {_shown(size)}" for name, size in of.items() if size) for of in sizes]
    return " / ".join(dict.fromkeys(said))


def _sorted_out(values: Row) -> tuple[Row, dict[str, list[Row]]]:
    """Split values into plain ones, nested names joined as "outer.inner", and tables (lists of rows)."""
    plain: Row = {}
    tables: dict[str, list[Row]] = {}
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            tables[name] = value
        elif isinstance(value, dict) and value:
            inner, inner_tables = _sorted_out(value)
            plain |= {f"{name}.{key}": of for key, of in inner.items()}
            tables |= {f"{name}.{key}": rows for key, rows in inner_tables.items()}
        else:
            plain[name] = value
    return plain, tables


def _pairs(values: Row) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"{name:<{width}}  {_shown(value)}" for name, value in values.items()]


def _aligned(rows: list[Row]) -> list[str]:
    """Return a table with a column per name: numbers aligned right, words left."""
    names = _columns(rows)
    cells = [names, *([_shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    return ["  ".join(_padded(line, widths, words)).rstrip() for line in cells]


def _padded(line: list[str], widths: list[int], words: list[bool]) -> Iterator[str]:
    for cell, width, is_word in zip(line, widths, words, strict=True):
        yield cell.ljust(width) if is_word else cell.rjust(width)


def _markdown(rows: list[Row]) -> list[str]:
    names = _columns(rows)
    lines = [names, ["---"] * len(names), *([_shown(row.get(name)) for name in names] for row in rows)]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value) if isinstance(value, str | int) else json.dumps(value)


def _listed(depths: Any) -> str:
    return ", ".join(map(str, depths))


def _indented(lines: list[str]) -> list[str]:
    return ["  " + line for line in lines]
