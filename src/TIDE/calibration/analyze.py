"""Analysis: at which depth of a model its tokens are decided, by several measures.

    cosine      the state's cosine similarity to the final state is above `convergence_threshold`
    identity    the model's own norm and LM head predict the full model's token from the state
    lens        a trained lens head does
    memory      a trained memory head does, at its first and at its last draft step

    oracle      the mean depth at which tokens would exit with perfect knowledge: for identity the depth from which it agrees
                at all later ones too, for heads the first candidate checkpoint that agrees; full depth if there is none

Only tokens that the model wrote are counted. States of all depths are counted as they are computed and then freed. Heads are
trained on training texts and measured on held-out ones, which also decide when their training ends.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.weights import unwrapped
from TIDE.calibration.collect import Budget, _run, _shards, collect, extended, laid_out
from TIDE.calibration.fit import Exits, Schedule, Split, agreed, best_tokens, fit_head, fresh_head, measure
from TIDE.calibration.labels import converged
from TIDE.calibration.self_texts import ANSWER
from TIDE.calibration.text import Text
from TIDE.calibration.texts import load_texts
from TIDE.config import TIDEConfig, with_short_names
from TIDE.routing.fingerprint import fingerprint
from TIDE.routing.heads import MEMORIES, HeadSizes, head_sizes, input_depths, memory_depths

GROUP_BYTES = 512 << 20  # of states of all depths in memory at once
AT_ONCE = 1024  # positions whose logits are in memory at once
QUICK_TEXTS = 24
QUICK_ANSWER = 48  # longest answer, in tokens
SCHEDULE = Schedule(batch_tokens=8192, positions=2048)
QUICK = Schedule(epochs=2, batch_tokens=2048, positions=512, checks=1)
CRITERIA = ("cosine", "identity", "lens", "memory", "memory_last")


@dataclass(frozen=True)
class Analysis:
    """The depths at which a model's tokens are decided.

    Attributes:
        texts: number of texts, with `tokens` counted positions.
        held_out_tokens: number of positions on which heads were measured; 0: no heads.
        convergence_threshold: of the cosine column.
        draft_steps: of the column "memory_last".
        rows: one per depth: "depth", and for each of CRITERIA the share of tokens, or None.
        oracle_depth: mean depth needed, by criterion.
    """

    model: str
    layers: int
    texts: int
    tokens: int
    held_out_tokens: int
    convergence_threshold: float
    draft_steps: int
    rows: list[dict[str, Any]]
    oracle_depth: dict[str, float]

    @property
    def titles(self) -> dict[str, str]:
        """The titles of the measured criteria."""
        names = {
            "cosine": f"cosine > {self.convergence_threshold:g}",
            "memory": "memory, step 1",
            "memory_last": f"memory, step {self.draft_steps}",
        }
        measured = [name for name in CRITERIA if any(row[name] is not None for row in self.rows)]
        return {name: names.get(name, name) for name in measured}

    def table(self) -> str:
        """Return the analysis as a table for the terminal."""
        held_out = f", {self.held_out_tokens} of them to measure heads" if self.held_out_tokens else ""
        head = f"{self.model}: {self.layers} layers, {self.tokens} tokens of {self.texts} texts{held_out}"
        cells = [["depth", *self.titles.values()]]
        cells += [[str(row["depth"]), *(_percent(row[name]) for name in self.titles)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        depths = ", ".join(f"{name} {depth:.1f}" for name, depth in self.oracle_depth.items())
        return "\n".join([head, "", *lines, "", f"mean depth needed by an oracle, of {self.layers}: {depths}"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write the analysis as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")


def analyze(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TIDEConfig | None = None,
    *,
    samples: int = 200,
    heads: bool = True,
    seed: int = 0,
    quick: bool = False,
    dataset: str | None = None,
) -> Analysis:
    """Measure at which depth the tokens of a model are decided. The model is left unchanged.

    Args:
        config: `calibration_dataset`, `checkpoint_interval` and `convergence_threshold` are read.
        samples: number of texts.
        heads: train lens and memory heads at the candidate checkpoints, which takes most of the time.
        seed: of texts and training.
        quick: few, short texts and little training, for a first look.
        dataset: short for `calibration_dataset` of `config`.
    """
    model, config = unwrapped(model), with_short_names(config, {"dataset": dataset})
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples must be a whole number of at least 1, found {samples!r}.")
    samples = min(samples, QUICK_TEXTS) if quick else samples
    with closing(ModelAdapter(model)) as adapter:
        source = config.calibration_dataset
        answer = QUICK_ANSWER if quick and source == "self" else ANSWER
        texts = load_texts(source, model, tokenizer, samples, seed, answer)
        counted = [_converged(adapter, texts, config.convergence_threshold)]
        schedule = QUICK if quick else SCHEDULE
        if heads:
            candidates = list(range(0, adapter.num_layers, config.checkpoint_interval))
            counted += _with_heads(adapter, _Course(*_split(texts), candidates, schedule, seed))
        shares = {key: share for found in counted for key, share in found.shares.items()}
        return Analysis(
            model=fingerprint(model).name or type(model).__name__,
            layers=adapter.num_layers,
            texts=len(texts),
            tokens=counted[0].tokens,
            held_out_tokens=counted[-1].tokens if heads else 0,
            convergence_threshold=config.convergence_threshold,
            draft_steps=schedule.draft_steps,
            rows=_rows(shares),
            oracle_depth={name: depth for found in counted for name, depth in found.oracle.items()},
        )


class _Counted(NamedTuple):
    """The counts of some criteria on the same tokens."""

    tokens: int
    shares: dict[tuple[int, str], float]  # (depth, criterion) -> share of tokens
    oracle: dict[str, float]


class _Course(NamedTuple):
    """The texts, depths and schedule of head training."""

    train: list[Text]
    valid: list[Text]
    depths: list[int]
    schedule: Schedule
    seed: int


def _rows(shares: dict[tuple[int, str], float]) -> list[dict[str, Any]]:
    depths = sorted({depth for depth, _ in shares})
    return [{"depth": depth} | {name: shares.get((depth, name)) for name in CRITERIA} for depth in depths]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


@torch.no_grad()
def _converged(adapter: ModelAdapter, texts: list[Text], threshold: float) -> _Counted:
    """Count cosine and identity at every depth except 0 and the last, over all texts."""
    layers, taps = adapter.num_layers, tuple(range(1, adapter.num_layers))
    near, right = torch.zeros(2, len(taps), dtype=torch.long)
    tokens = needed = 0
    with tqdm(total=len(texts), desc="states at every depth", unit="text") as bar:
        for group in _groups(adapter, texts):
            shard = laid_out(group, adapter.device)
            states = _run(adapter, shard, layers, list(taps))
            full = states.pop(layers)[shard.asked]
            best = best_tokens(adapter, None, full, None, AT_ONCE)
            found = [states.pop(depth)[shard.asked] for depth in taps]
            near += torch.stack([converged(at, full, threshold).sum() for at in found]).cpu()
            hits = torch.stack([best_tokens(adapter, None, at, None, AT_ONCE) == best for at in [*found, full]])
            right += hits[:-1].sum(1).cpu()
            # consecutive depths that agree, counted from the end, need not be run
            needed += int((layers + 1 - hits.flip(0).long().cumprod(0).sum(0)).sum())
            tokens += len(best)
            bar.update(len(group))
    shares = {}
    for index, depth in enumerate(taps):
        shares[depth, "cosine"] = int(near[index]) / tokens
        shares[depth, "identity"] = int(right[index]) / tokens
    return _Counted(tokens, shares, {"identity": needed / tokens})


def _groups(adapter: ModelAdapter, texts: list[Text]) -> Iterator[list[Text]]:
    """Yield groups of texts of similar length whose states at all depths fit into memory together."""
    per_token = adapter.num_layers * adapter.hidden_dim * adapter.model.dtype.itemsize
    for shard in _shards(texts):
        size = max(1, GROUP_BYTES // (per_token * len(shard[-1].ids)))
        yield from (shard[at : at + size] for at in range(0, len(shard), size))


def _split(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """Return texts to train on and texts to measure on."""
    train, valid = [text for text in texts if not text.is_held_out], [text for text in texts if text.is_held_out]
    if not train or not valid:
        raise ValueError(
            f"heads need texts to learn from and others to measure on; {len(texts)} texts gave {len(train)} and {len(valid)}. "
            f"Give more samples (20 or more), or leave heads out (heads=False, --no-heads)."
        )
    return train, valid


def _with_heads(adapter: ModelAdapter, course: _Course) -> list[_Counted]:
    """Train lens and memory heads at the candidate checkpoints, and count their agreement on held-out texts."""
    layers = adapter.num_layers
    hits: dict[str, dict[int, torch.Tensor]] = {"lens": {}, "memory": {}}
    with tempfile.TemporaryDirectory(prefix="tide-states-") as folder:
        budget, remembered = Budget(adapter.device, Path(folder)), memory_depths(layers, MEMORIES)
        split = Split(
            collect(adapter, course.train, remembered, budget, "states to learn from"),
            collect(adapter, course.valid, remembered, budget, "states to measure on"),
        )
        for depth in course.depths:
            with extended(adapter, split, input_depths(depth, _sizes(adapter, "memory", depth).inputs), budget):
                for strategy in ("lens", "memory") if depth else ("memory",):
                    head = _fitted(adapter, split, course, strategy, depth)
                    hits[strategy][depth] = agreed(adapter, head, split.valid, Exits(depth, None), course.schedule.draft_steps)
    return [_counted(strategy, found, layers) for strategy, found in hits.items() if found]


def _sizes(adapter: ModelAdapter, strategy: str, depth: int) -> HeadSizes:
    return head_sizes(strategy, adapter.model.config.get_text_config(decoder=True), adapter.hidden_dim, depth)


def _counted(strategy: str, hits: dict[int, torch.Tensor], layers: int) -> _Counted:
    """Return shares and oracle depth, given (steps, tokens) hits by depth."""
    shares = {(depth, strategy): found[0].float().mean().item() for depth, found in hits.items()}
    if strategy == "memory":
        shares |= {(depth, "memory_last"): found[-1].float().mean().item() for depth, found in hits.items()}
    should_exit = torch.stack([torch.where(found[0], depth, layers) for depth, found in hits.items()]).amin(0)
    return _Counted(len(should_exit), shares, {strategy: should_exit.float().mean().item()})


def _fitted(adapter: ModelAdapter, split: Split, course: _Course, strategy: str, depth: int) -> nn.Module:
    schedule = course.schedule.fitted_to(adapter.hidden_dim, adapter.vocab_size, adapter.device)
    head = fresh_head(strategy, _sizes(adapter, strategy, depth), course.seed)
    measure(adapter, head, split.train, depth)
    title = f"{strategy} at depth {depth}"
    return fit_head(adapter, head, split, Exits(depth, None), schedule, course.seed, title).head
