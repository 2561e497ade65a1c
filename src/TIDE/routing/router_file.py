"""Router files: records of calibrations, on disk and on the Hub.

    exits.{depth}.head.{parameter}      exits.{depth}.router.{parameter}      vocabulary      sha256       tensors
    settling.router.{parameter}         settling.maps.{depth}.{parameter}                                  of prompts, if fitted
    everything else                                                                                        one JSON document

`storage.py` reads and writes the bytes, `validate.py` checks them, `policies.py` makes an exit policy of a file. Files of
tide-inference 0.2.1 are read into the same class (`original.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from TIDE.hub import broken_answer, hub_trouble
from TIDE.routing import storage
from TIDE.routing.card import LIBRARY, brief_text, card_text, summary_text
from TIDE.routing.certificate import Certificate
from TIDE.routing.exits import Exit
from TIDE.routing.heads import HeadSizes, IdentityHead
from TIDE.routing.original import ORIGIN, ORIGINAL_KEYS, THRESHOLD, is_original, read_original
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.record import FORMAT, Record
from TIDE.routing.router import Router
from TIDE.routing.validate import fields_of, refuse_constant, wrong_with

OLDEST_FORMAT = 1  # of 0.3.0, without a checksum
HUB_FILE = "router.safetensors"


class RouterFile(Record, ModelHubMixin):
    """A record that is read, written and shared: see `Record` for its fields."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)  # the mixin's own would collect the arguments for a config.json; ours are in the file

    def save(self, path: str | Path, compress: bool = False) -> None:
        """Write to `.safetensors` or `.pt`, completely or not at all.

        Args:
            compress: store the heads' matrices in 8 bits; they are read back as bf16, slightly changed.
        """
        path = Path(path)
        storage.check_suffix(path)
        if wrong := wrong_with(self):
            raise ValueError(f"this router file was not saved: {wrong}. Calibrate again.")
        heads: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for depth, at in self.exits.items():
            heads |= at.head_tensors(depth)
            others |= at.router_tensors(depth)
        for part in self.parts.values():
            others |= part.tensors()
        if self.vocabulary is not None:
            others["vocabulary"] = self.vocabulary.to(torch.int32)
        document = json.dumps(self.as_dict(), sort_keys=True, allow_nan=False)
        storage.write(path, storage.Stored(document, (storage.compress(heads) if compress else heads) | others))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file; raise with the reason if it is not usable."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no router file {path}. Give the path of a .safetensors or .pt file, or None for no exits."
            )
        storage.check_suffix(path)
        content = storage.read(path)
        if isinstance(content, storage.Stored):
            return cls._from_stored(content, path)
        if is_original(content):
            return cls._from_original(read_original(content, path), path)
        found = storage.shown(list(content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{path} is not a router file: expected the entries ['tide', 'tensors'] (in a .safetensors file, 'tide' in its "
            f"metadata) or, of {ORIGIN}, {list(ORIGINAL_KEYS)}, found {found!s:.200}. Give the file that calibration saved."
        )

    @classmethod
    def _from_stored(cls, stored: storage.Stored, path: Path) -> Self:
        try:
            document = json.loads(stored.document, parse_constant=refuse_constant)
            made_as = document["format"]
            if made_as in (OLDEST_FORMAT, FORMAT):
                if made_as != OLDEST_FORMAT and stored.checksum is None:
                    raise ValueError("its checksum is missing")
                file = cls(**fields_of(document, dict(stored.tensors)), path=path)
                if wrong := wrong_with(file):
                    raise ValueError(wrong)
                return file
        except Exception as problem:  # a damaged document can fail in any way
            what = f"it lacks {problem}" if isinstance(problem, KeyError) else str(problem)
            raise ValueError(
                f"{path} is damaged: {storage.shown(what)}. Make it again, or get it again from where it came."
            ) from problem
        raise ValueError(
            f"{path} has format {storage.shown(made_as)}, this version of TIDE reads formats {OLDEST_FORMAT} to {FORMAT}. "
            f"Install a newer one from its repository, or calibrate again."
        )

    @classmethod
    def _from_original(cls, routers: dict[int, Router], path: Path) -> Self:
        sizes = HeadSizes(next(iter(routers.values())).down.in_features)
        exits = {depth: Exit(IdentityHead(sizes), router, THRESHOLD) for depth, router in routers.items()}
        facts = {"origin": ORIGIN}
        pending = ExitPolicy.max_pending
        return cls("identity", exits, tuple(exits), pending, facts=facts, version=ORIGIN.split()[-1], path=path)

    def summary(self, everything: bool = True) -> str:
        """Return the contents as text.

        Args:
            everything: also configuration, training facts and figures.
        """
        return (summary_text if everything else brief_text)(self.as_dict(), self._parts_shown())

    def generate_model_card(self, repo_id: str | None = None, base_model: str | None = None) -> ModelCard:
        """Return the model card of the file for the Hub.

        Args:
            repo_id: hub id of the repository for the file.
            base_model: hub id of the model it is for.
        """
        return ModelCard(card_text(self.as_dict(), self._parts_shown(), repo_id, base_model))

    def _parts_shown(self) -> dict[str, dict[str, Any]]:
        return {part.title: storage.plain(part.shown()) for part in self.parts.values()}

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(save_directory / HUB_FILE)
        card = save_directory / "README.md"
        if card.exists() and f"library_name: {LIBRARY}" in card.read_text(encoding="utf-8"):
            card.unlink()  # the card of an earlier file: the mixin writes a new one only if there is none

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the file and its card. `options` are those of huggingface_hub's mixin."""
        card = {"repo_id": repo_id} | (options.pop("model_card_kwargs", None) or {})
        return super().push_to_hub(repo_id, model_card_kwargs=card, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Read a file written by `save_pretrained` or `push_to_hub`.

        Args:
            pretrained_model_name_or_path: a folder, or an id on the Hub.
            options: revision, token, cache_dir, force_download, local_files_only.
        """
        # the mixin's own looks for a config.json first, and fails or warns if there is none
        return cls._from_pretrained(model_id=str(pretrained_model_name_or_path), **options)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Self:
        folder = Path(model_id)
        if folder.is_dir():
            return cls.load(folder / HUB_FILE)
        if (trouble := hub_trouble()) is not None:
            options["local_files_only"] = True
        try:
            path = hf_hub_download(model_id, HUB_FILE, **options)
        except LocalEntryNotFoundError as problem:
            raise OSError(
                f"cannot load the router file of {model_id!r}: the hub cannot be reached ({trouble or problem}), and it was "
                f"not downloaded before. Check the connection, or give a folder."
            ) from problem
        except Exception as problem:  # the type depends on the HTTP library in use
            if (why := broken_answer(problem)) is None:
                raise
            raise OSError(f"cannot load the router file of {model_id!r}: {why}. Try again, or give a folder.") from problem
        return cls.load(path)


def add_certificate(source: str | Path, certificate: Certificate, target: str | Path) -> None:
    """Write a router file again with a certificate; exits stay as stored, compressed or not."""
    file = RouterFile.load(source)
    file.certificate = certificate
    stored = storage.read(Path(source))
    if not isinstance(stored, storage.Stored):  # of the original system, whose format has no certificate
        file.save(target)
        return
    if wrong := wrong_with(file):
        raise ValueError(f"this certificate was not saved: {wrong}. Certify again.")
    document = json.loads(stored.document) | {"format": FORMAT, "certificate": storage.plain(certificate.as_dict())}
    storage.write(Path(target), stored._replace(document=json.dumps(document, sort_keys=True, allow_nan=False)))
