"""Random requests: exits on and off, alone and together, again and streamed write one text; greedy it is `model.generate`'s."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from attempts import AGAIN, attempt, in_parts
from families import COMPILED, VOCAB, build
from policies import ByState, Everyone, Knowing, texts_of
from router_files import a_file
from runners import as_it_is, on_references
from TIDE import TIDE, TIDEConfig

pytestmark = pytest.mark.full

TIE = 5e-6  # of logits around 1: some dozens of the last bit
FAMILIES = ["llama", "qwen2-sliding", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt2", "bloom", "lfm2", "gemma4-shared"]
tiny = functools.cache(build)
drafted: list[int] = []


class Odd(LogitsProcessor):
    """After an even token odd ones are likely."""

    def __call__(self, ids, scores):
        odd = torch.arange(scores.shape[1], device=scores.device) % 2
        return scores + 1.5 * (ids[:, -1:] % 2 == 0) * odd


class AtSevens(StoppingCriteria):
    """A text ends with a token that seven divides."""

    def __call__(self, ids, scores, **_):
        return ids[:, -1] % 7 == 0


def random_prompts(chance: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """One to four rows with padding on the left, some of which begin alike."""
    rows, columns = chance.randint(1, 4), chance.randint(1, 40)
    first = [chance.randrange(3, VOCAB) for _ in range(columns)]
    ids = torch.tensor([[one if chance.random() < 0.8 else chance.randrange(3, VOCAB) for one in first] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : chance.choice([0, chance.randrange(columns)])] = 0
    return ids * mask, mask


def random_options(chance: random.Random, rows: int) -> dict[str, Any]:
    """What `model.generate` takes as well."""
    found: dict[str, Any] = dict(max_new_tokens=chance.randint(1, 24), pad_token_id=0, do_sample=chance.random() < 0.5)
    found["eos_token_id"] = chance.choice([None, 2, chance.sample(range(2, VOCAB), 6)])
    optional = dict(
        repetition_penalty=chance.choice([1.3, 0.8]),
        no_repeat_ngram_size=chance.randint(1, 3),
        min_new_tokens=chance.randint(1, 8),
        bad_words_ids=[[chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 2))] for _ in range(5)],
        suppress_tokens=chance.sample(range(3, VOCAB), 20),
        logits_processor=[Odd()],
        stopping_criteria=[AtSevens()],
    )
    if found["do_sample"]:
        found |= dict(top_k=chance.choice([0, 1, 5, 50]), temperature=chance.choice([0.3, 1.0, 1.7]))
        found["seed"] = [chance.randint(1, 2**63) for _ in range(rows)]
        optional |= dict(top_p=chance.choice([0.3, 0.9]), min_p=0.05, typical_p=0.8, epsilon_cutoff=0.02)
    found |= {name: value for name, value in optional.items() if chance.random() < 0.2}
    if "stopping_criteria" in found and found["eos_token_id"] is None:
        found["eos_token_id"] = 2  # without an end token `model.generate` goes on with rows that criteria ended
    return found


def random_options_of_ours(chance: random.Random) -> dict[str, Any]:
    optional = dict(
        presence_penalty=chance.uniform(-1, 1),
        frequency_penalty=chance.uniform(-1, 1),
        logit_bias={chance.randrange(VOCAB): chance.uniform(-5, 5) for _ in range(5)},
        cache_salt="salt",
    )
    return {name: value for name, value in optional.items() if chance.random() < 0.15}


def random_config(chance: random.Random, least_gib: float) -> TIDEConfig:
    return TIDEConfig(
        mode="exact",
        min_layers=0,
        exit_threshold=chance.choice([None, 0.0, 0.5]),
        max_pending=chance.choice([None, *range(1, 13)]),
        compaction_threshold=chance.random(),
        cache_gib=least_gib ** chance.random(),
        draft_tree=chance.choice([None, 0, 1, 7, 31]),
    )


def random_exits(chance: random.Random, model, texts: list[list[int]], tmp_path):
    """A policy, or a router file with random heads."""
    depths = tuple(sorted(chance.sample(range(4), chance.randint(1, 4))))
    kind = chance.choice(["everyone", "state", "knowing", "identity", "lens", "memory"])
    if kind == "everyone":
        return Everyone(*depths)
    if kind == "state":
        return ByState(*depths)
    if kind == "knowing":
        return Knowing(texts, depths, chance.getrandbits(20), chance.random(), chance.choice([0.0, 0.5, 0.9, 1.0]))
    vocabulary = chance.choice([None, torch.arange(2, VOCAB, chance.randint(1, 5))])
    path = tmp_path / "router.safetensors"
    a_file(model, kind, depths, chance.random(), vocabulary, chance.getrandbits(20)).save(path)
    return path


def written(engine: TIDE, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
    return engine.generate(ids, attention_mask=mask, **options), [row.new_tokens for row in engine.last_rows]


def one_by_one(engine: TIDE, requests: list[dict[str, Any]]) -> list[list[int]]:
    """The texts of rows that come to the batch in turn."""
    rows = []
    for request in requests:
        rows.append(engine.add(**request))
        engine.step()
    for _ in range(1000):
        if all(row.finished for row in rows):
            break
        engine.step()
    assert not any(row.error for row in rows), [row.error for row in rows]
    return [row.new_tokens for row in rows]


def is_tie(model, mask, promised: torch.Tensor, found: torch.Tensor) -> bool:
    """True if texts part only where the model's two best logits are closer than the order of sums moves them."""
    if promised.shape != found.shape:
        return False
    for row in (promised != found).any(1).nonzero().flatten().tolist():
        place = int((promised[row] != found[row]).nonzero()[0])
        text = promised[row, :place][mask.shape[1] - int(mask[row].sum()) :][None]
        logits = model(text).logits[0, -1]
        both = logits[torch.stack([promised[row, place], found[row, place]])]
        if float(logits.max() - both.min()) > TIE:
            return False
    return True


def compare(chance: random.Random, tmp_path) -> None:
    family = chance.choice(FAMILIES)
    place = on_references if family in COMPILED and chance.random() < 0.25 else as_it_is
    model = tiny(family)
    config = random_config(chance, 1e-3 if place is on_references else 1e-6)  # in rounds a row has to find room
    ids, mask = random_prompts(chance)
    asked, ours = random_options(chance, len(ids)), random_options_of_ours(chance)
    with TIDE(model, None, config) as engine:
        expected, texts = written(engine, ids, mask, **asked, **ours)
    if not asked["do_sample"] and not {"presence_penalty", "frequency_penalty", "logit_bias"} & set(ours):
        promised = model.generate(ids, attention_mask=mask, **asked)
        assert torch.equal(promised, expected) or is_tie(model, mask, promised, expected), f"{family}: exits off"

    exits = random_exits(chance, model, texts_of(expected, mask), tmp_path)
    what = f"{family}, {exits}, {place.__name__}, {config}, {asked}, {ours}"
    with place(TIDE(model, exits, config)) as engine:
        for time in ("first", "second"):
            found, again = written(engine, ids, mask, **asked, **ours)
            assert torch.equal(found, expected) and again == texts, f"{time} time: {what}"
            drafted.append(engine.last_stats.drafted)
        if isinstance(exits, Knowing):
            return  # which knows rows by their numbers
        requests = []
        for row in range(len(ids)):
            own = {"seed": asked["seed"][row]} if "seed" in asked else {}
            requests.append(dict(inputs=ids[row : row + 1], attention_mask=mask[row : row + 1], **{**asked, **ours, **own}))
        row = chance.randrange(len(ids))
        assert list(engine.stream(**requests[row])) == texts[row], f"stream of row {row}: {what}"
        assert one_by_one(engine, requests) == texts, f"rows added in turn: {what}"


@pytest.mark.long
@pytest.mark.invariant(3)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@in_parts
def test_random_requests_have_one_text(part, tmp_path):
    """30 requests; 2,000 others with TIDE_LONG=1."""
    drafted.clear()
    attempt(lambda chance: compare(chance, tmp_path), few=30, many=2000)
    assert AGAIN or sum(count > 0 for count in drafted) >= len(drafted) / 3, "drafts were made"
