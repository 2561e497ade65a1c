"""Kept: records of long work in a file, a line each, so that work that was broken off goes on where it stopped.

    {"settings": {...}}                     what records depend on; a file begun with other settings is refused
                                            (router files and prompts by their `identity`: names and folders do not say)
    {"key": "…", "record": {...}}           one piece of work that is done

`results_file` writes what a page quotes, in the form of docs/results.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Kept:
    """Records by key.

    Args:
        settings: what all records depend on.
    """

    def __init__(self, path: Path, settings: Record) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(settings))
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # an interruption may have cut off the last line
        if not whole:
            path.write_text(json.dumps({"settings": settings}) + "\n", "utf-8")
            return
        first, *rest = [json.loads(line) for line in whole.splitlines()]
        held = first.get("settings", {})
        if different := sorted(key for key in {*held, *settings} if held.get(key) != settings.get(key)):
            said = ", ".join(f"{key} {settings.get(key)!r} instead of {held.get(key)!r}" for key in different)
            raise SystemExit(f"{path} was begun with other settings: found {said}. Use the same ones, or move it away.")
        self.records = {line["key"]: line["record"] for line in rest}
        if whole != text:
            os.truncate(path, len(whole.encode()))

    def once(self, key: str, work: Callable[[], Record]) -> Record:
        """Return the record of a piece of work, which is done if it was not done before."""
        if key not in self.records:
            self.records[key] = json.loads(json.dumps(work()))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "record": self.records[key]}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return self.records[key]


def identity(of: Any) -> str:
    """Return a short hash of a file's bytes, given its path, or of plain values."""
    content = of.read_bytes() if isinstance(of, Path) else json.dumps(of).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def results_file(path: Path, found: Record) -> None:
    """Write figures with command, commit, date, hardware and software.

    Args:
        found: what, settings, and table or figures; note where something has to be said.
    """
    from TIDE.evals.machine import circumstances, commit
    from TIDE.routing.storage import write_atomically

    facts = circumstances()
    load = f"; load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    machine, packages = facts["hardware"], facts["packages"]
    places = ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}, {machine['threads']} in use"
    document = {
        "what": found["what"],
        "command": f"python benchmarks/{_without_paths(facts['command'])}",
        "commit": (commit(Path(__file__).parent.parent) or "not recorded")[:40],
        "date": facts["date"][:10],
        "hardware": places + load,
        "software": ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers") if name in packages),
    }
    document |= {key: found[key] for key in ("settings", "note", "table", "figures") if key in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())


def _without_paths(command: str) -> str:
    """Return a command without the folders of this machine."""
    words, found = command.split(), []
    while words:
        word = words.pop(0)
        if word in ("--work", "--out", "--figure"):
            words.pop(0)
        else:
            found += [word, "DIR"] if word == "--data" else [word]
            words = words[1:] if word == "--data" else words
    return " ".join(found)
