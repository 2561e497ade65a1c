"""The plan: what a configuration and an exit policy come to for the model at hand.

`None` in the configuration is replaced by the policy's figure, checkpoints below `min_layers` are dropped, and
what the model's layers cannot do is refused here, once, with the layers named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.probe import Store
from TIDE.config import MOST_ROWS, TIDEConfig, checked_config
from TIDE.engine.cache.slots import MOST_ROUND
from TIDE.engine.runners.prompt_pass import PromptPass
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.certificate import Certificate, Settings
from TIDE.routing.policy import ExitPolicy

logger = logging.getLogger(__name__)
DRAFT_OVERHEAD = 0.25  # of a step: an exit head, its LM head and the draft's place in the deep pass
DEFAULT_TREES = {1: 31, 2: 15, 4: 15}  # drafts of a tree by the slots of a round on a GPU, unless asked for
ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class Plan:
    """The choices of an engine, resolved for its model."""

    exact: bool
    kv_cache_strategy: str
    exit_threshold: float
    max_pending: int
    compaction_threshold: float
    exit_thresholds: Mapping[int, float]  # of checkpoints that have their own
    spans: tuple[range, ...]  # the layers of each segment; a checkpoint stands before each but the first
    weighs: bool = False  # drafts are made where they are worth their time, whatever the thresholds
    rests: bool = False  # rows whose drafts lose time go on without for a while
    max_exit_share: float = 1.0  # mode "fast": of a row's new tokens
    checkpoint: int | None = None  # the one that rounds launched as a whole draft from
    cache_gib: float | None = None  # of K/V on a GPU, at most
    prompt_pass: PromptPass | None = None  # None: prompts run all layers
    trees: Mapping[int, int] = field(default_factory=dict)  # drafts of a tree by slots; on others drafts are in a row
    has_asked_for_tree: bool = False  # the configuration has, and so wants to hear where there is none

    @property
    def draft_tree(self) -> int:
        """Most drafts of a tree; 0: there are none."""
        return max(self.trees.values(), default=0)

    def threshold(self, depth: int) -> float:
        """The score needed to exit at a checkpoint."""
        return self.exit_thresholds.get(depth, self.exit_threshold)

    def within_share(self, exits: int, tokens: int) -> bool:
        """Return True if one more exit is allowed in a row that has `exits` among its new `tokens`.

        In mode "fast" exits are never more than `max_exit_share` of the new tokens, the one to come included.
        """
        return self.exact or exits + 1 <= self.max_exit_share * (tokens + 1) + ROUNDING

    @property
    def most_drafts(self) -> int:
        """Drafts in a row of a round that is launched as a whole. In mode "fast" they are part of the text, so there every row
        may have as many whatever others there are, and no more rows take part than such a round has room for."""
        return min(self.max_pending, MOST_TOKENS - 1) if len(self.spans) > 1 else 0

    @property
    def catches_up(self) -> bool:
        """True if skipped layers run later; otherwise their K/V are filled in."""
        return self.kv_cache_strategy == "exact"


def make_plan(config: TIDEConfig, policy: ExitPolicy | None, adapter: ModelAdapter) -> Plan:
    """Resolve what the configuration leaves open."""
    config = checked_config(config)
    _check_strategy(config, adapter)
    if policy is not None:
        policy.check_model(adapter)
    mode = config.effective_mode
    if policy is not None and config.mode is None and mode == "fast":
        name, exact = ("prefill_exits", False) if config.prefill_exits else ("kv_cache_strategy", "exact")
        logger.warning(
            "%s=%r goes with mode 'fast' only, so mode 'fast' was chosen: exits are not verified, and the text may differ from "
            "the full model's. Say mode='fast' to choose it without this warning, or %s=%r.",
            *(name, getattr(config, name), name, exact),
        )
    certificate = None if policy is None else _certificate(config, policy, adapter)
    never = certificate is not None and certificate.threshold is None
    checkpoints = [] if policy is None or never else _checkpoints(config, policy, adapter.num_layers)
    edges = [0, *checkpoints, adapter.num_layers]
    asked = config.exit_threshold if certificate is None else certificate.threshold
    rests = mode == "exact" and policy is not None and policy.weighs
    return Plan(
        exact=mode == "exact",
        kv_cache_strategy=config.kv_cache_strategy,
        exit_threshold=_first(asked, policy and _at_least(policy, mode, policy.exit_threshold), 1.0),
        max_pending=_first(config.max_pending, policy and policy.max_pending, 1),
        compaction_threshold=config.compaction_threshold,
        exit_thresholds={} if policy is None or asked is not None else _exit_thresholds(config, policy),
        spans=tuple(range(start, stop) for start, stop in pairwise(edges)),
        weighs=rests and config.exit_threshold is None,
        rests=rests,
        max_exit_share=config.max_exit_share,
        checkpoint=_draft_checkpoint(policy, checkpoints, mode, adapter.num_layers),
        cache_gib=config.cache_gib,
        trees=(trees := _trees(config, mode, checkpoints)),
        has_asked_for_tree=config.draft_tree is not None and bool(trees),
    )


def _trees(config: TIDEConfig, mode: str, checkpoints: list[int]) -> dict[int, int]:
    """Return the drafts of trees by slots: none where nothing is drafted and verified, or a round has no room for them."""
    if mode != "exact" or not checkpoints or config.draft_tree == 0:
        return {}
    if config.draft_tree is None:
        return dict(DEFAULT_TREES)
    slots = [1 << power for power in range(MOST_ROWS.bit_length())]
    return {count: config.draft_tree for count in slots if (config.draft_tree + 1) * count <= MOST_ROUND}


def _draft_checkpoint(policy: ExitPolicy | None, checkpoints: list[int], mode: str, num_layers: int) -> int | None:
    """Return the checkpoint that brings most for the layers it takes. Mode "fast" must ask all of them, so there it is the only
    one or none."""
    if policy is None or not checkpoints or (mode == "fast" and len(checkpoints) > 1):
        return None
    exits = policy.exits

    def worth(depth: int) -> float:
        agreement = exits[depth].figures.get("agreement_by_step") if depth in exits else None
        return (agreement[0] if agreement else 0.5) / (depth / num_layers + DRAFT_OVERHEAD)

    return max(checkpoints, key=worth)


def _checkpoints(config: TIDEConfig, policy: ExitPolicy, num_layers: int) -> list[int]:
    asked = list(policy.checkpoints)
    if asked != sorted(set(asked)) or not all(isinstance(depth, int) and 0 <= depth < num_layers for depth in asked):
        raise ValueError(
            f"checkpoints must be rising depths from 0 to {num_layers - 1} for a model of {num_layers} layers, found {asked}."
        )
    least = _first(config.min_layers, policy.min_layers)
    allowed = [depth for depth in asked if depth >= least]
    if asked and not allowed:
        logger.warning(
            "min_layers is %d and all exits are at smaller depths (%s), so no token will exit. Use min_layers=%d%s.",
            least,
            ", ".join(map(str, asked)),
            asked[-1],
            " or less" if asked[-1] else "",
        )
    return allowed


def settings(config: TIDEConfig, policy: ExitPolicy, adapter: ModelAdapter) -> Settings:
    """Return the settings that a certificate depends on."""
    return Settings(
        kv_cache_strategy=config.kv_cache_strategy,
        min_layers=_first(config.min_layers, policy.min_layers),
        max_pending=_first(config.max_pending, policy.max_pending),
        max_exit_share=config.max_exit_share,
        dtype=str(adapter.model.dtype).removeprefix("torch."),
        prefill_exits=config.prefill_exits,
    )


def _certificate(config: TIDEConfig, policy: ExitPolicy, adapter: ModelAdapter) -> Certificate | None:
    """The policy's certificate, if mode "fast" is to go by it."""
    certificate = policy.certificate
    if certificate is None or config.effective_mode != "fast" or config.exit_threshold is not None:
        return None
    if different := certificate.settings.differences(settings(config, policy, adapter)):
        logger.warning(
            "the certificate of this router file holds for other settings and is not used: found %s. Certify with these "
            "settings (TIDE.certify), or use those of the certificate.",
            ", ".join(different),
        )
        return None
    if certificate.threshold is None:
        logger.warning('the certificate of this router file lets no token leave in mode "fast". Use mode "exact".')
    return certificate


def _exit_thresholds(config: TIDEConfig, policy: ExitPolicy) -> dict[int, float]:
    return {depth: _at_least(policy, config.effective_mode, threshold) for depth, threshold in policy.exit_thresholds.items()}


def _at_least(policy: ExitPolicy, mode: str, threshold: float) -> float:
    """Mode "fast" takes nothing back, so it asks for more."""
    return max(threshold, policy.fast_threshold) if mode == "fast" else threshold


def _check_strategy(config: TIDEConfig, adapter: ModelAdapter) -> None:
    states = [index for index, store in enumerate(adapter.stores) if store is Store.STATE]
    if states and config.kv_cache_strategy != "exact":
        raise ValueError(
            f"kv_cache_strategy={config.kv_cache_strategy!r} fills in the K/V of skipped layers, but layers {states} of this "
            f"model keep a running state (linear attention or convolution) and have no K/V of their own. "
            f"Use kv_cache_strategy='exact'."
        )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
