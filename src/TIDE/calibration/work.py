"""Saved progress of a calibration, in a folder beside its router file: each slow result is saved at once.

    router.safetensors.unfinished/
        settings.json       the settings; resuming with other ones is refused
        texts.json          the texts
        head-4.safetensors  a fitted head, with its figures

Each file appears by a rename, so an existing file is complete. The folder is removed when the router file is written.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from TIDE.calibration.fit import Fitted
from TIDE.calibration.text import Text
from TIDE.routing.storage import write_atomically


class Work:
    """The saved progress of a calibration."""

    def __init__(self, save_path: Path, settings: dict[str, Any], resume: bool) -> None:
        self.folder = save_path.with_name(save_path.name + ".unfinished")
        kept = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        if resume and kept.exists():
            found = json.loads(kept.read_text("utf-8"))
            different = sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key))
            if different:
                raise ValueError(
                    f"{self.folder} was begun with other settings ({', '.join(different)}). Use the same ones to go on, or "
                    f"start anew without resume."
                )
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._write("settings.json", json.dumps(settings, indent=1))

    def texts(self) -> list[Text] | None:
        path = self.folder / "texts.json"
        return [Text(*one) for one in json.loads(path.read_text("utf-8"))] if path.exists() else None

    def keep_texts(self, texts: list[Text]) -> None:
        self._write("texts.json", json.dumps(texts))

    def head(self, depth: int, empty: nn.Module) -> Fitted | None:
        """Return a fitted head, loaded into an empty one; None if there is none."""
        path = self.folder / f"head-{depth}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            empty.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            told = file.metadata()
        steps = int(told.get("steps", 0))  # not told by older versions
        return Fitted(empty.eval().requires_grad_(False), json.loads(told["agreement"]), steps)

    def keep_head(self, depth: int, fitted: Fitted) -> None:
        path = self.folder / f"head-{depth}.safetensors"
        state = {name: tensor.cpu().contiguous() for name, tensor in fitted.head.state_dict().items()}
        write_atomically(path, save(state, {"agreement": json.dumps(fitted.agreement), "steps": str(fitted.steps)}))

    def finish(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, text.encode())
