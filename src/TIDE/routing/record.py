"""The record of a calibration: what a router file holds.

An exit head, a router and a threshold for every checkpoint tried, the checkpoints in use, and the evidence: the model's
fingerprint, the configuration, training facts, measured figures, a certificate if there is one, and the version that made it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from TIDE.prompt_exits.maps import KEY, FittedPromptExit, build_prompt_exit
from TIDE.routing import storage
from TIDE.routing.certificate import Certificate
from TIDE.routing.exits import Exit
from TIDE.routing.fingerprint import Fingerprint
from TIDE.version import __version__

FORMAT = 2


@dataclass(eq=False)
class Record:
    """The result of a calibration.

    Attributes:
        strategy: the kind of exit head.
        exits: by depth (layers run), in rising order.
        checkpoints: the depths in use.
        max_pending: largest number of consecutive exits before a token runs all layers.
        vocabulary: token ids an exit may predict; None: all.
        config, facts, figures: configuration, training facts and measured figures, as plain values.
        certificate: result of `TIDE.certify`, used by mode "fast".
        prompt_exit: exits in the prompt, if calibration fitted them.
        version: of the TIDE that made the file.
        path: the file it was read from.
    """

    strategy: str
    exits: dict[int, Exit]
    checkpoints: tuple[int, ...]
    max_pending: int
    vocabulary: torch.Tensor | None = None
    fingerprint: Fingerprint | None = None
    config: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    certificate: Certificate | None = None
    prompt_exit: FittedPromptExit | None = None
    version: str = __version__
    path: Path | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the tensors, as JSON values."""
        values = {
            "format": FORMAT,
            "version": self.version,
            "strategy": self.strategy,
            "checkpoints": self.checkpoints,
            "max_pending": self.max_pending,
            "vocabulary": None if self.vocabulary is None else len(self.vocabulary),
            "exits": {depth: at.describe() for depth, at in self.exits.items()},
            "fingerprint": None if self.fingerprint is None else asdict(self.fingerprint),
            "config": self.config,
            "facts": self.facts,
            "figures": self.figures,
            "certificate": None if self.certificate is None else self.certificate.as_dict(),
        }
        return storage.plain(values | {name: part.describe() for name, part in self.parts.items()})

    @property
    def parts(self) -> dict[str, FittedPromptExit]:
        """Parts beside the exits, by their names in the document."""
        return {} if self.prompt_exit is None else {KEY: self.prompt_exit}


def parts_in(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fields of a record that are parts beside the exits. Their tensors are removed from the dictionary."""
    return {"prompt_exit": build_prompt_exit(document[KEY], tensors) if document.get(KEY) is not None else None}
