"""Exits off draws from the model's distribution, with every processor that kernels know, with others, and with several.

Texts of a few tokens of a small vocabulary, drawn thousands of times, against the probabilities that transformers' processors
leave (OpenAI's penalties and bias are worked out here). Counted are whole contexts, by chi-square, and how likely the drawn
tokens were on the whole: that alone notices a temperature that is off by 3 %.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from families import build
from levels import daily
from TIDE import TIDE
from TIDE.engine.host.sampler import Sampler

pytestmark = pytest.mark.invariant(3)

VOCAB, NEW = 40, 2
PROMPT = [3, 1]
ROWS, MANY = 2000, 5  # rows of a call, and calls to notice little
RIGHT, WRONG = 1e-3, 1e-7  # p-values: seeds are pinned, so a right rule that passes once passes always


class Penalties(LogitsProcessor):
    """OpenAI: mu[j] - c[j] * frequency - float(c[j] > 0) * presence, where c counts new tokens."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, ids, scores):
        scores = scores.clone()
        for row, text in enumerate(ids.tolist()):
            for token, times in Counter(text[len(PROMPT) :]).items():
                scores[row, token] -= times * self.frequency + self.presence
        return scores


class Bias(LogitsProcessor):
    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = bias

    def __call__(self, ids, scores):
        return scores + torch.tensor([self.bias.get(token, 0.0) for token in range(VOCAB)])


class Shy(LogitsProcessor):
    """A processor of the user's own: what was written last is less likely."""

    def __call__(self, ids, scores):
        return scores.scatter_add(1, ids[:, -1:], torch.full((len(ids), 1), -1.5))


SAMPLING: dict[str, dict] = {
    "plain": dict(top_k=0),
    "temperature": dict(temperature=0.9, top_k=0),
    "top-k": dict(temperature=1.4, top_k=6),
    "top-p": dict(temperature=1.4, top_k=0, top_p=0.9),
    "min-p": dict(temperature=1.6, top_k=0, min_p=0.1),
    "repetition penalty": dict(temperature=1.3, top_k=0, repetition_penalty=1.4),
    "suppressed tokens": dict(top_k=0, suppress_tokens=[2, 5]),
    "suppressed at the beginning": dict(top_k=0, begin_suppress_tokens=[2, 5]),
    "bad words": dict(top_k=0, bad_words_ids=[[1], [4]]),
    "sequence bias": dict(top_k=0, sequence_bias=[[[1], 1.5], [[4], -2.0]]),
    "minimum length": dict(top_k=0, min_new_tokens=2, eos_token_id=[0, 3]),
    "forced end": dict(top_k=0, forced_eos_token_id=2),
    "normalized": dict(top_k=3, renormalize_logits=True),
    "penalties of the text": dict(top_k=0, presence_penalty=0.9, frequency_penalty=0.7),
    "logit bias": dict(top_k=0, logit_bias={1: 1.0, 3: -1.0, 5: -math.inf}),
    "pieces": dict(temperature=1.5, top_k=9, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5, suppress_tokens=[2]),
    "filters": dict(temperature=0.9, top_k=30, top_p=0.98, min_p=0.005, logit_bias={1: 1.0}),
    # on the host, by transformers' own list
    "typical": dict(temperature=1.4, top_k=0, typical_p=0.8),
    "no repeated pairs": dict(top_k=0, no_repeat_ngram_size=2),
    "longer bad words": dict(top_k=0, bad_words_ids=[[1, 4], [2]]),
    "bias before a penalty": dict(top_k=0, sequence_bias=[[[1], 1.5]], repetition_penalty=1.4),
    "the user's own": dict(temperature=1.3, top_k=5, logits_processor=[Shy()]),
}
CALLS = {"penalties of the text": 2}  # few texts repeat a token; a call says enough about the others
ON_HOST = {"typical", "no repeated pairs", "longer bad words", "bias before a penalty", "the user's own"}


@functools.cache
def model():
    """One layer is quick; its logits are spread as those of a trained model are."""
    made = build("llama", vocab_size=VOCAB, num_hidden_layers=1)
    made.lm_head.weight.data *= 3
    return made


def options(name: str, new: int = NEW, **changed) -> dict:
    given = dict(do_sample=True, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
    return {**given, **SAMPLING[name], **changed}


def drawn(name: str, calls: int = 0) -> list[tuple[int, ...]]:
    """Texts that the engine draws, up to an end token."""
    ids, found = torch.tensor([PROMPT]).expand(ROWS, -1), []
    with TIDE(model()) as engine:
        for seed in range(calls or CALLS.get(name, 1)):
            engine.generate(ids, attention_mask=torch.ones_like(ids), seed=seed, **options(name))
            found += [tuple(row.new_tokens) for row in engine.last_rows]
            assert all(bool(row.sampling.custom) == (name in ON_HOST) for row in engine.last_rows)
    return found


def drawn_from(probs: dict[tuple[int, ...], torch.Tensor]) -> list[tuple[int, ...]]:
    """As many texts as the engine draws in many calls, by these probabilities."""
    torch.manual_seed(2)
    found: list[tuple[int, ...]] = [()] * (MANY * ROWS)
    for _ in range(NEW):
        found = [(*text, int(torch.multinomial(probs[text], 1))) if text in probs else text for text in found]
    return found


def theirs(name: str, **changed) -> dict:
    """The same for `model.generate`, with OpenAI's settings as processors."""
    asked = options(name, **changed)
    own = [Penalties(asked.pop("presence_penalty", 0.0), asked.pop("frequency_penalty", 0.0))]
    own.append(Bias(asked.pop("logit_bias", {})))
    return {**asked, "logits_processor": LogitsProcessorList([*own, *asked.get("logits_processor", [])])}


def expected(name: str, **changed) -> dict[tuple[int, ...], torch.Tensor]:
    """Text so far -> (vocabulary,) what `model.generate` draws the next token from."""
    found: dict[tuple[int, ...], torch.Tensor] = {}
    texts: list[tuple[int, ...]] = [()]
    asked = theirs(name, **changed)
    ends = asked["eos_token_id"] or []
    for length in range(NEW):
        probs = _next(asked, texts, length)
        found.update(zip(texts, probs, strict=True))
        longer = [(*text, token) for text, own in zip(texts, probs, strict=True) for token in range(VOCAB) if own[token] > 0]
        texts = [text for text in longer if text[-1] not in ends]
    return found


def _next(asked: dict, texts: list[tuple[int, ...]], length: int) -> torch.Tensor:
    """Ask `model.generate` for texts that were begun by force, so that it processes them as it goes."""

    class Forced(LogitsProcessor):
        def __call__(self, ids, scores):
            at = ids.shape[1] - len(PROMPT)
            if at >= length:
                return scores
            forced = torch.full_like(scores, -math.inf)
            forced[range(len(texts)), [text[at] for text in texts]] = 0.0
            return forced

    ids = torch.tensor([PROMPT]).expand(len(texts), -1)
    processors = LogitsProcessorList([*asked["logits_processor"], Forced()])
    both = dict(return_dict_in_generate=True, output_scores=True, attention_mask=torch.ones_like(ids))
    output = model().generate(ids, **{**asked, "logits_processor": processors}, **both)
    return output.scores[length].double().softmax(-1)


def p_values(texts: list[tuple[int, ...]], probs: dict[tuple[int, ...], torch.Tensor]) -> dict[str, float]:
    counts = {so_far: torch.zeros(VOCAB).double() for so_far in probs}
    for text in texts:
        for length, token in enumerate(text):
            if text[:length] not in counts:
                return {"impossible": 0.0}
            counts[text[:length]][token] += 1
    return {
        "contexts": chi_square([(counts[so_far], own) for so_far, own in probs.items()]),
        "how likely": two_sided([(counts[so_far], own) for so_far, own in probs.items()]),
    }


def two_sided(tables: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """p-value of the sum of the drawn tokens' log probabilities: too likely or too unlikely ones move it."""
    total = variance = 0.0
    for counts, probs in tables:
        if bool(counts[probs == 0].any()):
            return 0.0
        logs = torch.where(probs > 0, probs, 1.0).log()
        mean = float((probs * logs).sum())
        total += float((counts * (logs - mean)).sum())
        variance += float(counts.sum()) * float((probs * (logs - mean) ** 2).sum())
    return math.erfc(abs(total) / math.sqrt(2 * variance)) if variance > 1e-6 else 1.0


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


@pytest.mark.parametrize("name", daily(SAMPLING, {"pieces", "penalties of the text", "the user's own"}))
def test_exits_off_draws_what_transformers_processors_leave(name):
    values = p_values(drawn(name), expected(name))
    assert min(values.values()) > RIGHT, values


@pytest.mark.parametrize("name", daily(["temperature", "filters"], ["temperature"]))
def test_many_draws_are_what_transformers_processors_leave_too(name):
    values = p_values(drawn(name, MANY), expected(name))
    assert min(values.values()) > RIGHT, values


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("temperature", dict(temperature=0.97 * 0.9)),
        ("filters", dict(temperature=1.03 * 0.9)),
        ("top-k", dict(top_k=8)),
        ("top-p", dict(top_p=0.93)),
        ("min-p", dict(min_p=0.07)),
        ("repetition penalty", dict(repetition_penalty=1.1)),
        ("penalties of the text", dict(presence_penalty=0.2)),
        ("penalties of the text", dict(frequency_penalty=0.0)),
        ("minimum length", dict(min_new_tokens=1)),
        ("logit bias", dict(logit_bias={1: 0.5, 5: -math.inf})),
    ],
    ids=str,
)
def test_another_setting_is_noticed(name, changed):
    """In as many draws as notice a temperature that is off by three percent."""
    assert min(p_values(drawn_from(expected(name, **changed)), expected(name)).values()) < WRONG


def test_noise_that_repeats_is_noticed(monkeypatch):
    """Rows that share their noise draw the same tokens."""
    choose = Sampler._choose
    monkeypatch.setattr(Sampler, "_choose", lambda self, rows, *rest: dict.fromkeys(rows, choose(self, rows, *rest)[rows[0]]))
    assert min(p_values(drawn("plain"), expected("plain")).values()) < WRONG


def test_p_values_are_those_of_the_tables():
    """0.05 is at 18.307 with 10 degrees of freedom, and at 1.96 standard deviations."""
    probs = torch.full((11,), 1 / 11).double()
    counts = torch.full((11,), 100.0).double()
    counts[0] += (18.307 * 100 / 2) ** 0.5
    counts[1] -= (18.307 * 100 / 2) ** 0.5
    assert chi_square([(counts, probs)]) == pytest.approx(0.05, rel=1e-3)
    probs = torch.tensor([0.8, 0.2]).double()
    moved = 1.96 * math.sqrt(1000 * 0.8 * 0.2)
    assert two_sided([(torch.tensor([800 + moved, 200 - moved]).double(), probs)]) == pytest.approx(0.05, rel=1e-2)
