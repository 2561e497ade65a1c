"""Sampling in mode "exact" draws from the model's distribution, whatever the drafts are drawn from.

Two contexts, each drawn from thousands of times: a prompt and a forced first token, after which every token is
drafted from a distribution that has nothing to do with the model, in rounds of two. Counted are the first drafted token, the
next one after a draft that was accepted and after one that was not, and whole texts; compared with the exact distribution,
worked out from the scores of `model.generate`, and with samples of it. The same comparison notices every wrong rule below.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from families import build
from policies import Everyone
from TIDE import TIDE, ExitStats, TIDEConfig
from TIDE.engine.round import sampler as sampling
from TIDE.engine.round.sampler import Draft, Sampler

pytestmark = pytest.mark.invariant(3)

VOCAB, PROMPT, NEW = 6, 5, 4  # NEW with the forced one
MANY, FEW, ROWS = 2000, 800, 200  # draws of each context: to pass, and enough to notice a wrong rule; in one call
FORCED = {3: 4, 5: 1}  # first token of a prompt -> what its text begins with
CONTEXTS = torch.tensor([[3, 1, 4, 2, 5], [5, 5, 2, 3, 1]])
SAMPLING = {
    "temperature": dict(temperature=0.6, top_k=0),
    "top-p": dict(temperature=1.4, top_k=0, top_p=0.8),
    "top-k": dict(temperature=1.4, top_k=4),
    "repetition penalty": dict(temperature=1.3, top_k=0, repetition_penalty=1.4),
    "all": dict(temperature=1.5, top_k=5, top_p=0.9, repetition_penalty=1.3),
}
RIGHT, WRONG = 1e-3, 1e-7  # p-values: seeds are pinned, so a right rule that passes once passes always


class Begin(LogitsProcessor):
    """Forces the first new token, so that all rows of a prompt draft in the same context."""

    def __call__(self, ids, scores):
        if ids.shape[1] > PROMPT:
            return scores
        forced = torch.full_like(scores, -float("inf"))
        forced[range(len(ids)), [FORCED[int(row[0])] for row in ids]] = 0.0
        return forced


class Elsewhere(Everyone):
    """Every token leaves with a guess that knows its position only."""

    def predict(self, candidates, head):
        guesses = 1.2 * torch.randn(PROMPT + NEW, VOCAB, generator=torch.Generator().manual_seed(8))
        return guesses[candidates.positions]


class Sample(NamedTuple):
    texts: list[tuple[int, ...]]  # context, then the new tokens after the forced one
    first_stood: list[bool]  # whether the first draft of the text was accepted
    stats: ExitStats


@pytest.fixture(scope="module")
def model():
    return build("llama", vocab_size=VOCAB)


def options(name: str, new: int = NEW) -> dict:
    given = dict(do_sample=True, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
    return {**given, **SAMPLING[name], "logits_processor": LogitsProcessorList([Begin()])}


def draw(model, name: str, draws: int, seed: int) -> list[tuple[int, ...]]:
    """So many texts of each context, by a model or an engine."""
    torch.manual_seed(seed)
    ids, found = CONTEXTS.repeat_interleave(ROWS, 0), []
    for _ in range(draws // ROWS):
        texts = model.generate(ids, attention_mask=torch.ones_like(ids), **options(name))[:, PROMPT + 1 :].tolist()
        found += [(row // ROWS, *text) for row, text in enumerate(texts)]
    return found


def sample(model, name: str, draws: int, monkeypatch) -> Sample:
    """Texts of the engine, and the fate of their first drafts: all rows of a call have theirs judged together."""
    verify, accepted = Sampler.verify, []

    def noting(self, logits):
        found = verify(self, logits)
        if any(len(row.tokens) == PROMPT + 1 for row in logits):
            assert all(len(row.tokens) == PROMPT + 1 and row.drafts for row in logits)
            accepted.extend(row.drafts[0].token == tokens[0] for row, tokens in found.items())
        return found

    monkeypatch.setattr(Sampler, "verify", noting)
    with TIDE(model, Elsewhere(1), TIDEConfig(max_pending=2, compaction_threshold=1.0)) as engine:
        texts = draw(engine, name, draws, seed=0)
    return Sample(texts, accepted, engine.total_stats)


def next_token(model, name: str) -> dict[tuple[int, ...], torch.Tensor]:
    """Text so far -> (vocabulary,) what `model.generate` draws the next token from."""
    found, texts = {}, [(context,) for context in range(len(CONTEXTS))]
    for length in range(NEW - 1):
        ids = torch.tensor([[*CONTEXTS[text[0]].tolist(), FORCED[int(CONTEXTS[text[0], 0])], *text[1:]] for text in texts])
        extra = dict(return_dict_in_generate=True, output_scores=True, attention_mask=torch.ones_like(ids))
        probs = model.generate(ids, **options(name, new=1), **extra).scores[0].double().softmax(-1)
        found.update(zip(texts, probs, strict=True))
        texts = [(*text, token) for text in texts for token in range(VOCAB)]
        assert len(texts) == len(CONTEXTS) * VOCAB ** (length + 1)
    return found


def chi_square(tables: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """p-value of counts given the probabilities of their cells, over independent tables; rare cells are pooled.

    1 where there is too little to say anything, 0 where something impossible was counted.
    """
    distance, freedom = 0.0, 0
    for counts, probs in tables:
        if bool(counts[probs == 0].any()):
            return 0.0
        means = probs * counts.sum()
        rare = means < 5
        pooled = torch.cat(
            [torch.stack([counts[~rare], means[~rare]], 1), torch.stack([counts[rare].sum(), means[rare].sum()])[None]]
        )
        pooled = pooled[pooled[:, 1] >= 1]
        distance += float(((pooled[:, 0] - pooled[:, 1]) ** 2 / pooled[:, 1]).sum())
        freedom += max(len(pooled) - 1, 0)
    if not freedom:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(distance / 2).double()))


def table(after: list[tuple[int, ...]], probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.bincount(torch.tensor([text[-1] for text in after], dtype=torch.long), minlength=VOCAB).double(), probs


def against_exact(found: Sample, exact: dict[tuple[int, ...], torch.Tensor]) -> dict[str, float]:
    """p-values of the first drafted token, of the second by the fate of the first, and of whole texts."""
    contexts, texts = range(len(CONTEXTS)), found.texts
    values = {"first": chi_square([table([t[:2] for t in texts if t[0] == c], exact[c,]) for c in contexts])}
    for fate in (True, False):
        seconds = [text[:3] for text, stood in zip(texts, found.first_stood, strict=True) if stood == fate]
        tables = [table([t for t in seconds if t[:2] == so_far], exact[so_far]) for so_far in exact if len(so_far) == 2]
        values["after an accepted draft" if fate else "after a rejected draft"] = chi_square(tables)
    whole = []
    for context in contexts:
        own = Counter(text for text in texts if text[0] == context)
        cells = [
            (*so_far, token) for so_far in exact if len(so_far) == NEW - 1 and so_far[0] == context for token in range(VOCAB)
        ]
        probs = [float(exact[c[:1]][c[1]] * exact[c[:2]][c[2]] * exact[c[:3]][c[3]]) for c in cells]
        whole.append((torch.tensor([own[c] for c in cells]).double(), torch.tensor(probs).double()))
    return {**values, "texts": chi_square(whole)}


def two_samples(ours: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> float:
    """p-value that texts of the same number were drawn from the same distribution; rare texts are pooled."""
    assert len(ours) == len(theirs)
    both = [Counter(ours), Counter(theirs)]
    often = [text for text, count in (both[0] + both[1]).items() if count >= 10]
    cells = [[own[text] for text in often] for own in both]
    counts = torch.tensor([[*own, len(ours) - sum(own)] for own in cells]).double()
    counts = counts[:, counts.sum(0) > 0]
    distance = ((counts[0] - counts[1]) ** 2 / counts.sum(0)).sum()
    return float(torch.special.gammaincc(torch.tensor((counts.shape[1] - 1) / 2).double(), distance / 2))


@pytest.mark.parametrize("name", SAMPLING)
def test_drafts_from_elsewhere_leave_the_distribution_the_models(model, name, monkeypatch):
    found = sample(model, name, MANY, monkeypatch)
    values = against_exact(found, next_token(model, name))
    values["two samples"] = two_samples(found.texts, draw(model, name, MANY, seed=1))
    assert min(values.values()) > RIGHT, values
    stats = found.stats
    assert min(stats.accepted_by_step[1], stats.accepted_by_step[2], stats.rollbacks) > 100
    assert min(sum(found.first_stood), len(found.texts) - sum(found.first_stood)) > 500
    assert stats.drafted > 2 * len(found.texts) == 4 * MANY


@pytest.mark.parametrize("name", SAMPLING)
def test_the_samples_of_generate_pass_the_same_test(model, name):
    """So what the engine is compared with is right."""
    texts = draw(model, name, MANY, seed=2)
    halves = Sample(texts, [row % 2 == 0 for row in range(len(texts))], ExitStats(4))
    assert min(against_exact(halves, next_token(model, name)).values()) > RIGHT


def always_accept(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(draft.token), len(probs)).float()


def draw_anew_from_everything(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """The right ratio, but a rejected draft is replaced from p, not from the remainder."""
    if torch.rand(()) < probs[draft.token] / draft.probs[draft.token]:
        return always_accept(probs, draft)
    return probs


def accept_by_the_models_probability(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """The right remainder, but p for p/q."""
    if torch.rand(()) < probs[draft.token]:
        return always_accept(probs, draft)
    rest = (probs - draft.probs).clamp(min=0)
    return rest / rest.sum()


def forget_processors_of_drafts(self, rows, logits, depth, choose=Sampler.sample):
    """Drafts are drawn as they should be and judged as if they had been drawn from the plain logits."""
    return [own._replace(probs=plain) for own, plain in zip(choose(self, rows, logits, depth), logits.softmax(-1), strict=True)]


def forget_processors_of_the_model(self, rows, step, logits, choose=Sampler._verify_one):
    if not any(row.drafts for row in rows):
        return choose(self, rows, step, logits)
    held, self.processors = self.processors, LogitsProcessorList()
    try:
        return choose(self, rows, step, logits)
    finally:
        self.processors = held


@pytest.mark.parametrize("name", ["temperature", "all"])
@pytest.mark.parametrize(
    ("place", "attribute", "rule"),
    [
        (sampling, "_speculative", always_accept),
        (sampling, "_speculative", draw_anew_from_everything),
        (sampling, "_speculative", accept_by_the_models_probability),
        (Sampler, "sample", forget_processors_of_drafts),
        (Sampler, "_verify_one", forget_processors_of_the_model),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_rule_is_noticed(model, name, place, attribute, rule, monkeypatch):
    monkeypatch.setattr(place, attribute, rule)
    found = sample(model, name, FEW, monkeypatch)
    values = against_exact(found, next_token(model, name))
    values["two samples"] = two_samples(found.texts, draw(model, name, FEW, seed=1))
    assert min(values.values()) < WRONG, values


def test_p_values_are_those_of_the_tables():
    """0.05 is at 18.307 with 10 degrees of freedom."""
    probs = torch.full((11,), 1 / 11).double()
    counts = torch.full((11,), 100.0).double()
    counts[0] += (18.307 * 100 / 2) ** 0.5
    counts[1] -= (18.307 * 100 / 2) ** 0.5
    assert chi_square([(counts, probs)]) == pytest.approx(0.05, rel=1e-3)
