"""The settings of the user: one frozen dataclass, validated once, read everywhere, changed nowhere.

`None` means "as calibrated": the value of the exit policy is used. Fields marked "calibration" are read when an exit policy is
made; the engine does not read them.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

MODES = ("exact", "fast")
EXIT_STRATEGIES = ("identity", "lens", "memory", "eagle3")
LABELS = ("agreement", "cosine")
MOST_ROWS = 64  # decoded together
MOST_TREE = 63  # drafts: with the newest token a pass of 64
KV_CACHE_STRATEGIES = ("exact", "propagate", "zero_pad")
CHOICES = {"mode": MODES, "label": LABELS, "exit_strategy": EXIT_STRATEGIES, "kv_cache_strategy": KV_CACHE_STRATEGIES}
SHARES = ("exit_threshold", "convergence_threshold", "compaction_threshold", "max_exit_share")
LEAST = {
    "min_layers": 0,
    "checkpoint_interval": 1,
    "calibration_samples": 20,
    "router_bottleneck_dim": 1,
    "max_pending": 1,
    "draft_tree": 0,
}
SHORT_NAMES = {  # of fields, in `tide calibrate` and `TIDE.calibrate`
    "minutes": "calibration_minutes",
    "samples": "calibration_samples",
    "dataset": "calibration_dataset",
    "strategy": "exit_strategy",
    "bottleneck": "router_bottleneck_dim",
    **{name: name for name in ("checkpoint_interval", "min_layers", "label", "prefill_exits")},
}
Class = TypeVar("Class", bound=type)


def _with_names_checked(config: Class) -> Class:
    """Let a dataclass refuse an unknown field with those it has. Its signature stays as it is."""
    generated = config.__init__  # type: ignore[misc]

    @functools.wraps(generated)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        known = [field.name for field in fields(config)]
        if unknown := unknown_setting(named, known, SHORT_NAMES):
            raise TypeError(unknown)
        generated(self, *values, **named)

    config.__init__ = checked  # type: ignore[misc]
    return config


@_with_names_checked
@dataclass(frozen=True)
class TIDEConfig:
    """Settings of calibration and decoding.

    Attributes:
        mode: "exact" generates the text of the full model; "fast" emits exit predictions without verifying them. None: exact,
            unless `kv_cache_strategy` ("propagate", "zero_pad") or `prefill_exits` needs mode fast; see `effective_mode`.
        exit_threshold: router score, in [0, 1], needed to exit; drafting still pauses in sequences where it costs time. None:
            the exit policy's threshold; with a router file, mode "exact" then drafts whenever the scores make it worth the
            time, and mode "fast" uses the file's certificate if it has one for these settings.
        min_layers: smallest depth at which a token may exit, and smallest candidate of calibration.
        checkpoint_interval: calibration: number of layers from one candidate checkpoint to the next.
        calibration_minutes: calibration: minutes to spend. Texts and training steps are as many as fit.
        calibration_samples: calibration: most texts. None: as many as fit into the minutes.
        calibration_dataset: calibration: "self" (the model writes the texts), "wikitext" or another data set of the hub,
            or the path of a .txt or .jsonl file.
        label: calibration: target that a router learns to predict. "agreement": the exit's token is the full model's;
            "cosine": the state has a cosine similarity to the final one above `convergence_threshold`.
        convergence_threshold: calibration: cosine similarity, in [0, 1], above which a state counts as converged. For label
            "cosine", and for `TIDE.analyze`.
        router_bottleneck_dim: calibration: width of the routers.
        exit_strategy: calibration: kind of exit head, which turns a state into a token. "identity": the model's own norm and
            LM head; "lens": a small residual network before them; "memory": a decoder block that also sees the full-depth
            state of the previous token; "eagle3": a block before the first layer that vLLM and SGLang run too.
        kv_cache_strategy: treatment of the layers a token skipped. "exact" runs them later, "propagate" writes their K/V
            from the exit state, "zero_pad" writes zeros.
        compaction_threshold: mode "fast" on the model's own layers, in a batch: if at most this share of the rows needs the
            deeper layers, only those rows run; otherwise every row with pending tokens runs with them. Compiled layers need
            none.
        max_pending: largest number of consecutive exits before a token has to run all layers.
        max_exit_share: mode "fast": largest share, in [0, 1], of a row's new tokens that may exit, at every point of the text;
            a token beyond it runs all layers. 1.0: no limit.
        prefill_exits: mode "fast": prompt tokens that have settled at a checkpoint stop there, and deeper layers get K/V made
            of their predicted states. The router file has to hold what that takes; calibration with this setting fits it.
        cache_gib: GiB of K/V on a GPU, at most; rows that find no room wait, and the newest is put back and computed again
            when the others need it. None: what is free of the GPU's memory, less a tenth of it. On a CPU: of texts that have
            ended, kept for others that begin alike; None: a third of what the weights take, from 0.125 to 1.
        draft_tree: mode "exact" on a GPU: most drafts of a row in a round, up to 63, as a tree instead of one behind the other:
            of several likely tokens at a place the full model's may be one. The text does not change. 0: no trees; None: 31
            for one row, 15 for two to four rows, none for more.
    """

    mode: str | None = None
    exit_threshold: float | None = None
    min_layers: int | None = None
    checkpoint_interval: int = 4
    calibration_minutes: float = 3.0
    calibration_samples: int | None = None
    calibration_dataset: str = "self"
    label: str = "agreement"
    convergence_threshold: float = 0.98
    router_bottleneck_dim: int = 128
    exit_strategy: str = "memory"
    kv_cache_strategy: str = "exact"
    compaction_threshold: float = 0.25
    max_pending: int | None = None
    max_exit_share: float = 0.9
    prefill_exits: bool = False
    cache_gib: float | None = None
    draft_tree: int | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            self._check(name, getattr(self, name) in choices, f"one of {list(choices)}")
        for name in SHARES:
            share = getattr(self, name)
            self._check(name, _is_number(share) and 0 <= share <= 1, "a number from 0 to 1")
        for name, least in LEAST.items():
            count = getattr(self, name)
            self._check(name, _is_number(count, int) and count >= least, f"a whole number of at least {least}")
        self._check("calibration_minutes", _is_above_zero(self.calibration_minutes), "a number of minutes above 0")
        self._check("prefill_exits", isinstance(self.prefill_exits, bool), "True or False")
        self._check("cache_gib", _is_above_zero(self.cache_gib), "a number of GiB above 0, or None")
        if self.draft_tree is not None and self.draft_tree > MOST_TREE:
            raise ValueError(f"draft_tree must be at most {MOST_TREE}, found {self.draft_tree}. 0 drafts no trees.")
        if not isinstance(self.calibration_dataset, str) or not self.calibration_dataset.strip():
            raise ValueError(
                f'calibration_dataset must be "self", a data set of the hub or the path of a .txt or .jsonl file, found '
                f"{self.calibration_dataset!r}."
            )
        if self.mode == "exact" and self.kv_cache_strategy != "exact":
            raise ValueError(
                f"kv_cache_strategy={self.kv_cache_strategy!r} loses what skipped layers would have stored, so it cannot "
                f"go with mode='exact'. Use kv_cache_strategy='exact', or mode='fast'."
            )
        if self.mode == "exact" and self.prefill_exits:
            raise ValueError(
                "prefill_exits=True gives prompt tokens predicted K/V, so it cannot go with mode='exact', whose text is the "
                "full model's. Use prefill_exits=False, or mode='fast'."
            )

    def _check(self, name: str, is_right: bool, words: str) -> None:
        """Raise unless a field is right, or None where that is its default."""
        if not is_right and not (getattr(self, name) is None and getattr(TIDEConfig, name) is None):
            raise ValueError(f"{name} must be {words}, found {getattr(self, name)!r}.")

    @property
    def effective_mode(self) -> str:
        """`mode`, with None resolved: fast if the K/V strategy or exits in the prompt need it, otherwise exact."""
        if self.mode is not None:
            return self.mode
        return "exact" if self.kv_cache_strategy == "exact" and not self.prefill_exits else "fast"

    def in_mode_exact(self) -> TIDEConfig:
        """Return these settings in mode "exact", without those that only mode "fast" has."""
        return replace(self, mode="exact", kv_cache_strategy="exact", prefill_exits=False)

    @classmethod
    def reference(cls) -> TIDEConfig:
        """Return the settings of the original system."""
        return cls(
            mode="fast",
            exit_threshold=0.85,
            min_layers=8,
            checkpoint_interval=4,
            calibration_samples=2000,
            calibration_dataset="wikitext",
            label="cosine",
            convergence_threshold=0.98,
            router_bottleneck_dim=128,
            exit_strategy="identity",
            kv_cache_strategy="zero_pad",
            compaction_threshold=0.25,
            max_exit_share=1.0,
        )

    def save(self, path: str | Path) -> None:
        """Write the settings as YAML (.yaml, .yml) or JSON (.json)."""
        path = Path(path)
        values = asdict(self)
        if _is_yaml(path):
            import yaml

            text = yaml.safe_dump(values, sort_keys=False)
        else:
            text = json.dumps(values, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TIDEConfig:
        """Read a file written by `save`. Unknown fields are an error."""
        path = Path(path)
        text = path.read_text(encoding="utf-8")
        try:
            values = _parse_yaml(text) if _is_yaml(path) else json.loads(text)
        except ValueError as problem:
            raise ValueError(f"{path} cannot be read as a TIDE configuration: {problem}") from problem
        if not isinstance(values, dict):
            raise ValueError(f"{path} should hold the fields of TIDEConfig, found {type(values).__name__}.")
        try:
            return cls(**values)
        except TypeError as problem:
            raise ValueError(f"{path}: {problem}") from problem


def checked_config(config: Any) -> TIDEConfig:
    """Return settings as they were given, the defaults for None."""
    if config is None:
        return TIDEConfig()
    if isinstance(config, TIDEConfig):
        return config
    instead = "(...)"
    if isinstance(config, dict):
        instead = f"({', '.join(f'{name}={value!r}' for name, value in config.items())})"
    elif isinstance(config, str | Path):
        instead = f".load({str(config)!r})"
    raise TypeError(f"config must be a TIDEConfig, found {type(config).__name__}. Use TIDEConfig{instead}.")


def with_short_names(config: TIDEConfig | None, given: dict[str, Any]) -> TIDEConfig:
    """Return settings with those that were given by their short names.

    Args:
        given: None leaves a setting as it is.
    """
    config, defaults = checked_config(config), TIDEConfig()
    longer = {field: name for name, field in SHORT_NAMES.items()}
    if unknown := unknown_setting(given, SHORT_NAMES, longer):
        raise TypeError(f"{unknown} All others are fields of config=TIDEConfig(...).")
    changes = {SHORT_NAMES[name]: value for name, value in given.items() if value is not None}
    for field, value in changes.items():
        if getattr(config, field) not in (getattr(defaults, field), value):
            raise TypeError(
                f"expected {longer[field]} or config.{field}, which mean the same, found {value!r} and "
                f"{getattr(config, field)!r}. Leave one out."
            )
    return replace(config, **changes)


def unknown_setting(given: Iterable[str], known: Iterable[str], other_names: dict[str, str]) -> str | None:
    """Return which of the given names is unknown, and what there is; None: all are known.

    Args:
        other_names: what a known name is called elsewhere.
    """
    known = list(known)
    name = next((name for name in given if name not in known), None)
    if name is None:
        return None
    meant = {own: own for own in known} | {other: own for other, own in other_names.items() if own in known}
    close = difflib.get_close_matches(str(name), meant, n=1)
    hint = f"; did you mean {meant[close[0]]}?" if close else "."
    return f"there is no setting {name}{hint} The settings are {', '.join(known)}."


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(str(problem)) from problem


def _is_yaml(path: Path) -> bool:
    if path.suffix in (".yaml", ".yml"):
        return True
    if path.suffix == ".json":
        return False
    raise ValueError(f"a configuration file ends in .yaml, .yml or .json, found {path.name!r}.")


def _is_number(value: object, kinds: Any = int | float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_above_zero(value: Any) -> bool:
    return _is_number(value) and 0 < value < float("inf")
