"""The model's own texts: written by it, the same for one seed, and never on both sides of the hold-out."""

from __future__ import annotations

import pytest
import torch

from families import build
from TIDE.calibration.self_texts import (
    CPU_TOKENS,
    TYPICAL,
    _Author,
    answer_prompts,
    answering_seconds,
    builtin_prompts,
    chat_frame,
    write_texts,
    writing_seconds,
)
from TIDE.calibration.text import Text

PROMPTS = ["Where is the sea?", "Count to three.", "Hi"]


def written(text):
    return text.ids[text.start :]


@pytest.fixture(autouse=True)
def _short_openings(monkeypatch):
    monkeypatch.setattr("TIDE.calibration.self_texts.OPENING", 12)


def test_built_in_prompts_are_many_and_varied():
    sections = builtin_prompts()
    everything = [prompt for section in sections.values() for prompt in section]
    assert len(everything) >= 400 and len(set(everything)) == len(everything)
    assert {"chat", "knowledge", "maths", "code", "languages", "tasks", "openings"} <= set(sections)
    assert all(len(section) >= 20 for section in sections.values())
    assert len({prompt.split()[0] for prompt in everything}) >= 100
    for name, section in sections.items():
        assert all(prompt.count("{text}") == (name == "tasks") for prompt in section)


@pytest.mark.parametrize("kind", ["plain", "chatty"])
def test_one_seed_writes_one_set_of_texts(kind, writer, request):
    tokenizer = request.getfixturevalue(kind)
    state = torch.get_rng_state()
    texts = write_texts(writer, tokenizer, 24, seed=0, answer=12)
    assert len(texts) == 24
    assert all(0 < text.start < len(text.ids) <= text.start + 12 for text in texts)
    assert texts == write_texts(writer, tokenizer, 24, seed=0, answer=12)
    assert texts != write_texts(writer, tokenizer, 24, seed=1, answer=12)
    assert torch.equal(state, torch.get_rng_state()), "the user's random numbers are left alone"


@pytest.mark.parametrize("kind", ["plain", "chatty"])
@torch.no_grad()
def test_greedy_answers_are_the_models(kind, writer, request):
    tokenizer = request.getfixturevalue(kind)
    texts = answer_prompts(writer, tokenizer, PROMPTS, seed=0, answer=24)
    assert [text.group for text in texts] == [0, 1, 2]
    for text, prompt in zip(texts, PROMPTS, strict=True):
        before = "<s>" + prompt if kind == "plain" else f"<s><user>{prompt}</s>\n<bot>"
        assert tokenizer.decode(text.ids[: text.start]) == before
        best = writer(torch.tensor([text.ids])).logits[0].argmax(-1).tolist()
        assert best[text.start - 1 : -1] == written(text)
        alone = writer.generate(torch.tensor([text.ids[: text.start]]), max_new_tokens=24, do_sample=False)
        assert alone[0].tolist() == text.ids


def test_a_text_ends_with_its_end_token(writer, plain):
    loud = build("llama", max_position_embeddings=1024)
    with torch.no_grad():
        loud.lm_head.weight[2] = writer.lm_head.weight.mean(0) + 0.3  # </s> comes up now and then
    texts = write_texts(loud, plain, 30, seed=0, answer=40)
    ended = [written(text) for text in texts if 2 in written(text)]
    assert ended and all(ids.index(2) == len(ids) - 1 for ids in ended)


def test_first_answers_are_greedy_and_some_later_ones_are_sampled(writer, plain):
    author = _Author(writer, plain, seed=0, answer=8)
    count = sum(len(section) for name, section in author.prompts.items() if name != "tasks")
    orders = author.builtin_orders(count + 5)
    assert {order.temperature for order in orders[:count]} == {0.0}
    assert all(order.temperature > 0 for order in orders[count:])
    assert [order.group for order in orders[count:]] == [order.group for order in orders[:5]]
    heats = [order.temperature for order in author.task_orders([Text([1, 40, 41], 1, 3)], 60)]
    assert 0 < sum(heat == 0 for heat in heats) < 60


def test_training_and_validation_share_no_group_and_no_prompt(writer, plain):
    texts = write_texts(writer, plain, 90, seed=0, answer=8)
    sides = [[text for text in texts if text.is_held_out is side] for side in (True, False)]
    assert all(sides)
    held, trained = [{text.group for text in side} for side in sides]
    assert not held & trained
    held, trained = [{tuple(text.ids[: text.start]) for text in side} for side in sides]
    assert not held & trained


def test_tasks_quote_passages_of_their_own_side(writer, plain):
    author = _Author(writer, plain, seed=0, answer=8)
    letter = {True: "~", False: "^"}  # in none of the tasks
    texts = [Text([1, *plain(letter[group % 10 == 0] * 40)["input_ids"][1:]], 1, group) for group in range(40)]
    orders = author.task_orders(texts, 80)
    assert {order.group % 10 == 0 for order in orders} == {True, False}
    for order in orders:
        words = plain.decode(order.prompt)
        assert letter[order.group % 10 == 0] in words
        assert letter[order.group % 10 != 0] not in words


@pytest.mark.parametrize("kind", ["plain", "chatty"])
def test_texts_stay_within_the_context(kind, request):
    small = build("llama", max_position_embeddings=40)
    longest = []
    small.register_forward_pre_hook(
        lambda _, args, given: longest.append(int(given["position_ids"].max()) + 1), with_kwargs=True
    )
    texts = write_texts(small, request.getfixturevalue(kind), 20, seed=0)
    assert len(texts) == 20
    assert max(len(text.ids) for text in texts) == 40
    assert max(longest) <= 40


def test_a_template_that_hides_the_user_is_refused(chatty):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chatty, "chat_template", "<s>hello")
        with pytest.raises(ValueError, match=r"does not show what the user says.*chat_template = None"):
            chat_frame(chatty)


def test_a_template_that_refuses_the_user_is_explained_in_a_line(chatty, monkeypatch):
    monkeypatch.setattr(chatty, "chat_template", "{{ raise_exception('a system\nmessage is needed') }}")
    with pytest.raises(ValueError, match=r"refuses a message of the user \(a system message is needed\).*None") as error:
        chat_frame(chatty)
    assert "\n" not in str(error.value)


def test_answers_take_one_pass_over_their_prompts(llama, chatty):
    seconds = answering_seconds(llama, chatty, seed=0, answer=16)
    fit = CPU_TOKENS // (TYPICAL + 16)
    assert 0 < seconds(1) <= seconds(fit) < seconds(fit + 1)
    assert seconds(10 * fit) == pytest.approx(10 * seconds(fit)), "batches that are full take as long as each other"


def test_more_texts_take_longer_to_write(llama, chatty):
    seconds = writing_seconds(llama, chatty, seed=0, answer=16)
    counts = [20, 200, 2000, 20_000]
    times = [seconds(count) for count in counts]
    assert 0 < times[0] < times[1] < times[2] < times[3]
    assert times[3] < 20 * times[2], "batches that are full take no longer than others"
