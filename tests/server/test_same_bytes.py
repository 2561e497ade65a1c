"""The same bytes: a request alone, among all the others, and again, greedy and seeded, with drafts on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from servers import tiny

COUNT = 24


def bodies() -> list[dict]:
    """Requests of every kind: lengths, sampling, penalties, several answers."""
    found = []
    for number in range(COUNT):
        body = dict(prompt=f"{number} {'word ' * (number % 7)}", max_tokens=6 + number % 9, temperature=0)
        if number % 2:
            body |= dict(temperature=1.0, seed=number, n=1 + number % 3)
        if number % 4 == 3:
            body |= dict(top_p=0.9, top_k=40, presence_penalty=0.5, logprobs=0)
        found.append(body)
    return found


def answered(server, body: dict) -> str:
    """An answer without what may differ: its id, time and logprobs, which on a CPU are equal to rounding only."""
    found = server.post("/v1/completions", **body).json()
    del found["id"], found["created"]
    for choice in found["choices"]:
        if choice["logprobs"]:
            choice["logprobs"] = [round(value, 3) for value in choice["logprobs"]["token_logprobs"]]
    return json.dumps(found)


def compared(server) -> tuple[list[str], list[str], list[str]]:
    """All answers alone, all at once, and all at once again."""
    alone = [answered(server, body) for body in bodies()]
    with ThreadPoolExecutor(COUNT) as threads:
        together = list(threads.map(lambda body: answered(server, body), bodies()))
        warm = list(threads.map(lambda body: answered(server, body), reversed(bodies())))
    return alone, together, warm[::-1]


def test_answers_do_not_depend_on_the_load(server):
    alone, together, warm = compared(server)
    assert alone == together == warm
    assert len(set(alone)) == COUNT
    assert server.worker.decoder.metrics.family("spec_decode_num_draft_tokens")._value.get() > 0, "nothing was drafted"


@pytest.mark.full
def test_the_comparison_notices_a_model_whose_logits_depend_on_the_load(another):
    """A kernel that sums in another order for other batches would do this in the last bits; here it is made visible."""
    loaded = tiny()
    head = loaded.model.lm_head
    forward = head.forward
    head.forward = lambda states: forward(states) * (1 if states.shape[:-1].numel() == 1 else -1)
    alone, together, _ = compared(another(model=loaded, router=None))
    assert alone != together


def test_the_comparison_notices_seeds_that_are_not_kept(server_without_exits, monkeypatch):
    monkeypatch.setattr("TIDE.server.service.seeds", lambda asked, count: [None] * count)
    alone, together, _ = compared(server_without_exits)
    greedy = [place for place, body in enumerate(bodies()) if body["temperature"] == 0]
    assert [alone[place] for place in greedy] == [together[place] for place in greedy]
    assert alone != together


@pytest.mark.parametrize("exits", [True, False])
def test_a_seed_gives_the_text_of_the_engine(server, exits):
    body = dict(prompt="Hello", max_tokens=10, temperature=0.8, seed=11)
    first = answered(server, body | {"tide": {"exits": exits}})
    assert first == answered(server, body)
