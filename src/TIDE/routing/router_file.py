"""Router files: the result of calibrating a model, on disk.

A file holds an exit head, a router and a threshold for every checkpoint tried, the checkpoints in use, and the evidence:
the model's fingerprint, the configuration, training facts, measured figures, a certificate if there is one, and the
version that made it.

    exits.{depth}.head.{parameter}      exits.{depth}.router.{parameter}      vocabulary      sha256       tensors
    settling.router.{parameter}         settling.maps.{depth}.{parameter}                                  of prompts, if fitted
    everything else                                                                                        one JSON document

`storage.py` reads and writes the bytes, `exits.py` builds an exit, `policies.py` makes an exit policy of a file. Files of
tide-inference 0.2.1 are read into the same class (`original.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError

from TIDE.hub import broken_answer, hub_trouble
from TIDE.routing import storage
from TIDE.routing.card import LIBRARY, brief_text, card_text, summary_text
from TIDE.routing.certificate import Certificate
from TIDE.routing.exits import EAGLE3, KINDS, Exit, build_exit
from TIDE.routing.fingerprint import Fingerprint
from TIDE.routing.heads import HeadSizes, IdentityHead
from TIDE.routing.original import ORIGIN, ORIGINAL_KEYS, THRESHOLD, is_original, read_original
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router import Router
from TIDE.routing.settling import FittedSettling, build_settling

FORMAT = 2
OLDEST_FORMAT = 1  # of 0.3.0, without a checksum
HUB_FILE = "router.safetensors"


def _version() -> str:
    try:
        return version_of(LIBRARY)
    except PackageNotFoundError:  # run from a source tree
        return "0+source"


@dataclass(eq=False)
class RouterFile(ModelHubMixin):
    """The result of a calibration.

    Attributes:
        strategy: the kind of exit head.
        exits: by depth (layers run), in rising order.
        checkpoints: the depths in use.
        max_pending: largest number of consecutive exits before a token runs all layers.
        vocabulary: token ids an exit may predict; None: all.
        config, facts, figures: configuration, training facts and measured figures, as plain values.
        certificate: result of `TIDE.certify`, used by mode "fast".
        settling: exits in the prompt, if calibration fitted them.
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
    settling: FittedSettling | None = None
    version: str = field(default_factory=_version)
    path: Path | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)  # the mixin's own would collect the arguments for a config.json; ours are in the file

    def save(self, path: str | Path, compress: bool = False) -> None:
        """Write to `.safetensors` or `.pt`, completely or not at all.

        Args:
            compress: store the heads' matrices in 8 bits; they are read back as bf16, slightly changed.
        """
        path = Path(path)
        storage.check_suffix(path)
        if wrong := _wrong_with(self):
            raise ValueError(f"this router file was not saved: {wrong}. Calibrate again.")
        heads: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for depth, at in self.exits.items():
            heads |= at.head_tensors(depth)
            others |= at.router_tensors(depth)
        if self.settling is not None:
            others |= self.settling.tensors()
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
            document = json.loads(stored.document, parse_constant=_refuse_constant)
            made_as = document["format"]
            if made_as in (OLDEST_FORMAT, FORMAT):
                if made_as != OLDEST_FORMAT and stored.checksum is None:
                    raise ValueError("its checksum is missing")
                file = cls(**_fields(document, dict(stored.tensors)), path=path)
                if wrong := _wrong_with(file):
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
        if self.settling is not None:
            values["settling"] = self.settling.describe()
        return storage.plain(values)

    def summary(self, everything: bool = True) -> str:
        """Return the contents as text.

        Args:
            everything: also configuration, training facts and figures.
        """
        return summary_text(self.as_dict()) if everything else brief_text(self.as_dict())

    def generate_model_card(self, repo_id: str | None = None, base_model: str | None = None) -> ModelCard:
        """Return the model card of the file for the Hub.

        Args:
            repo_id: hub id of the repository for the file.
            base_model: hub id of the model it is for.
        """
        return ModelCard(card_text(self.as_dict(), repo_id, base_model))

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
    if wrong := _wrong_with(file):
        raise ValueError(f"this certificate was not saved: {wrong}. Certify again.")
    document = json.loads(stored.document) | {"format": FORMAT, "certificate": storage.plain(certificate.as_dict())}
    storage.write(Path(target), stored._replace(document=json.dumps(document, sort_keys=True, allow_nan=False)))


def _fields(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fields of a RouterFile. Unused tensors are an error."""
    for name, tensor in tensors.items():
        if not (isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.is_contiguous()):
            raise ValueError(f"{name} is not a plain tensor")
    if document["strategy"] not in KINDS:
        raise ValueError(f"expected a strategy of {list(KINDS)}, found {document['strategy']!r}")
    vocabulary = tensors.pop("vocabulary", None)
    if document["vocabulary"] != (None if vocabulary is None else len(vocabulary)):
        raise ValueError(f"expected a vocabulary of {document['vocabulary']} tokens")
    tensors = storage.restore(tensors)
    exits = {}
    for depth in sorted(document["exits"], key=int):
        exits[int(depth)] = build_exit(document["strategy"], depth, document["exits"][depth], tensors)
    described = document.get("settling")
    settling = None if described is None else build_settling(described, tensors)
    if tensors:
        raise ValueError(f"it holds tensors that belong to no exit: {sorted(tensors)[:3]}")
    made_for, certificate = document["fingerprint"], document.get("certificate")  # older files have none
    same = {name: document[name] for name in ("version", "strategy", "max_pending", "config", "facts", "figures")}
    return same | {
        "exits": exits,
        "checkpoints": tuple(document["checkpoints"]),
        "vocabulary": None if vocabulary is None else vocabulary.long(),
        "fingerprint": None if made_for is None else Fingerprint(**made_for),
        "certificate": None if certificate is None else Certificate.from_dict(certificate),
        "settling": settling,
    }


def _wrong_with(file: RouterFile) -> str | None:
    """Return what makes a router file unusable, read or about to be written; None if nothing does."""
    depths = list(file.exits)
    if file.strategy not in KINDS:
        return f"expected a strategy of {list(KINDS)}, found {file.strategy!r}"
    if not depths:
        return "it holds no routers"
    if depths != sorted(depths) or not all(_is_whole(depth, 0) for depth in depths):
        return f"expected exits at rising depths, found {depths}"
    known = [depth for depth in depths if depth in file.checkpoints]
    if list(file.checkpoints) != known or not all(_is_whole(depth, 0) for depth in file.checkpoints):
        return f"expected checkpoints among the exits {depths}, rising, found {list(file.checkpoints)}"
    if not _is_whole(file.max_pending, 1):
        return f"expected a max_pending of at least 1, found {file.max_pending!r}"
    if not all(isinstance(values, dict) for values in (file.config, file.facts, file.figures)):
        return "expected names and values as config, facts and figures"
    if file.certificate is not None and (wrong := file.certificate.wrong()):
        return wrong
    if file.settling is not None and (wrong := file.settling.wrong()):
        return wrong
    for depth, at in file.exits.items():
        if wrong := at.wrong(file.strategy):
            return f"at depth {depth}, {wrong}"
    if len({at.sizes.hidden_dim for at in file.exits.values()}) > 1:
        return "its exits are for states of different sizes"
    if file.strategy == EAGLE3 and depths != [0]:
        return f"expected an EAGLE-3 head before the first layer, found {depths}"
    return None if file.vocabulary is None else _wrong_with_vocabulary(file.vocabulary, file.fingerprint)


def _wrong_with_vocabulary(vocabulary: torch.Tensor, made_for: Fingerprint | None) -> str | None:
    if vocabulary.ndim != 1 or not len(vocabulary) or vocabulary.is_floating_point():
        return f"expected a list of token ids as vocabulary, found {vocabulary.dtype} of {tuple(vocabulary.shape)}"
    least, most = int(vocabulary.min()), int(vocabulary.max())
    if least < 0 or (made_for and most >= made_for.vocab_size) or len(vocabulary.unique()) < len(vocabulary):
        return f"its vocabulary holds token ids that do not exist or come twice, from {least} to {most}"
    return None


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds the number {name}")
