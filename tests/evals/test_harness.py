"""The model `tide` in the real lm-evaluation-harness: its answers, those of the harness's own model, and what is kept."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest
import torch

from TIDE.evals.answers import Answers
from TIDE.evals.contenders import contenders
from TIDE.evals.harness import check_harness
from TIDE.evals.reading import read
from TIDE.evals.tasks import LOCAL, chosen_tasks
from TIDE.routing.certificate import Certificate, Settings


@pytest.fixture
def compared(harness, engine, plain):
    """What makes a model of the harness of the tiny engine."""
    from TIDE.evals.model import Compared

    def make(modes=("off", "exact", "fast"), thresholds=(0.4,), **options):
        return Compared(engine, plain, contenders(engine, modes, thresholds), max_new_tokens=12, **options)

    return make


@pytest.fixture
def tasks(harness, questions):
    return chosen_tasks(sorted(LOCAL), questions)


def responses(harness, lm, name, task, **options):
    found = harness.evaluate(lm, {name: task}, bootstrap_iters=0, **options)
    return [sample["resps"] for sample in found["samples"][name]]


def flat(values):
    return [number for value in values for number in (flat(value) if isinstance(value, list | tuple) else [value])]


@pytest.mark.parametrize("name", sorted(LOCAL))
@pytest.mark.parametrize("rows", [1, 3])
def test_exact_and_off_answer_as_the_harness_s_own_model(harness, compared, model, plain, tasks, name, rows):
    from lm_eval.models.huggingface import HFLM

    ours, task = compared(("off", "exact"), (), rows=rows), tasks[name].task
    task.config.generation_kwargs = task.config.generation_kwargs and {**task.config.generation_kwargs, "max_gen_toks": 12}
    theirs = HFLM(pretrained=model, tokenizer=plain, batch_size=1, max_length=1023, add_bos_token=name != "wikitext")
    wanted = flat(responses(harness, theirs, name, task))
    for contender in ours.compared:
        with ours.showing(contender):
            found = flat(responses(harness, ours, name, task))
        assert len(found) == len(wanted) and any(value != wanted[0] for value in wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)


def test_log_likelihoods_of_mode_fast_come_from_the_exits(compared, engine):
    lm = compared(("fast",))
    fast = lm.compared[1]
    ids = lm.asker.encode("two and two are four")
    with engine.using(fast.config):
        (reply,) = lm.asker.answer("loglikelihood", [("two and two", " are four")])
        logits = engine(torch.tensor([ids[:-1]])).logits[0]
        exited = engine.last_stats.exited_tokens
    after = ids[len(lm.asker.encode("two and two")) :]
    chances = torch.log_softmax(logits[-len(after) :].double(), -1)
    assert reply.value[0] == pytest.approx(sum(float(chances[place, token]) for place, token in enumerate(after)), rel=1e-5)
    assert reply.exited == exited > 0
    (full,) = _off(lm, engine, [("two and two", " are four")])
    assert reply.value[0] != pytest.approx(full.value[0], rel=1e-3)


def _off(lm, engine, requests):
    with engine.using(lm.compared[0].config, exits=False):
        return lm.asker.answer("loglikelihood", requests)


def test_choices_of_one_token_are_read_once(compared, engine, monkeypatch):
    lm, texts = compared(("off",)), []
    monkeypatch.setattr("TIDE.evals.asking.read", lambda engine, rows: texts.append(len(rows)) or read(engine, rows))
    replies = _off(lm, engine, [("Which?\nAnswer:", f"{letter}") for letter in "ABCD"])
    assert texts == [1] and len({reply.value[0] for reply in replies}) == 4
    assert sum(reply.tokens for reply in replies) == len(lm.asker.encode("Which?\nAnswer:"))


def test_texts_longer_than_the_model_s_context_are_cut_at_their_beginning(compared, engine):
    lm = compared(("off",))
    long = "x" * 3000
    (reply,) = _off(lm, engine, [(long, " y")])
    (same,) = _off(lm, engine, [(long[1000:], " y")])
    assert reply.value == same.value and reply.tokens == lm.asker.max_length
    with engine.using(lm.compared[0].config, exits=False):
        (reply,) = lm.asker.answer("generate_until", [(long, {"max_gen_toks": 4})])
    assert reply.tokens > 0


def test_questions_are_interleaved_and_the_first_one_changes(compared, tasks, monkeypatch):
    from TIDE.evals.evaluation import evaluate

    lm, order = compared(), []
    using = lm.engine.using
    monkeypatch.setattr(
        lm.engine, "using", lambda config, exits=True: order.append((config.mode, exits)) or using(config, exits)
    )
    evaluate(lm, {"gsm8k": tasks["gsm8k"]})
    turns = [order[3 + start : 6 + start] for start in range(0, 18, 3)]  # after the warm-up
    assert len(order) == 21 and all(len({*turn}) == 3 for turn in turns)
    assert [turns[place][0] for place in range(3)] == [order[1], order[2], order[0]]


def test_an_evaluation_tells_scores_speeds_and_sameness(compared, tasks):
    from TIDE.evals.evaluation import evaluate

    found = {one.task: one for one in evaluate(compared(), tasks)}
    assert set(found) == set(LOCAL) and all(one.error is None for one in found.values())
    for result in found.values():
        off, exact, fast = result.outcomes
        assert exact.same == exact.questions == off.questions and exact.quality[0].score == pytest.approx(off.quality[0].score)
        assert min(one.tokens for one in result.outcomes) > 0 and min(one.seconds for one in result.outcomes) > 0
        assert exact.quality[0].interval.low <= 0 <= exact.quality[0].interval.high
        assert fast.exit_rate > 0 and off.exit_rate == 0
        assert "same" in result.table() and f"{exact.same} of {exact.questions}" in result.table()
    assert found["gsm8k"].outcomes[2].loss.mean > 0 and "nothing is promised" in found["gsm8k"].table()
    assert found["wikitext"].outcomes[2].loss is None
    assert found["wikitext"].outcomes[0].quality[0].metric == "word_perplexity"


def test_a_limit_asks_the_first_of_a_mixed_order(compared, tasks):
    from TIDE.evals.evaluation import evaluate

    (found,) = evaluate(compared(("off",)), {"mmlu": tasks["mmlu"]}, limit=2)
    assert found.outcomes[0].questions == 2


def test_an_interrupted_evaluation_goes_on_where_it_stopped(compared, tasks, tmp_path):
    from TIDE.evals.evaluation import evaluate

    path, only = tmp_path / "kept.jsonl", {"gsm8k": tasks["gsm8k"]}
    first = compared(answers=Answers(path, {}))
    as_ever, asked = first.asker.answer, []

    def stops(kind, requests, brief=False):
        asked.append(brief)
        if asked.count(False) == 8:  # in the third question
            raise KeyboardInterrupt
        return as_ever(kind, requests, brief)

    first.asker.answer = stops
    with pytest.raises(KeyboardInterrupt):
        evaluate(first, only)
    kept = Answers(path, {})
    assert len(kept) == 2 * 3
    again, asked = compared(answers=kept), []
    as_ever = again.asker.answer
    again.asker.answer = lambda kind, requests, brief=False: asked.append(brief) or as_ever(kind, requests, brief)
    (found,) = evaluate(again, only)
    assert asked.count(False) == (6 - 2) * 3 and found.outcomes[1].same == 6
    asked.clear()
    (repeated,) = evaluate(compared(answers=Answers(path, {})), only)
    assert repeated == found


def test_a_task_that_fails_is_reported_and_the_others_are_measured(compared, tasks, monkeypatch):
    from TIDE.evals.evaluation import evaluate

    broken, fine = tasks["mmlu"], tasks["gsm8k"]
    monkeypatch.setattr(broken.task, "process_results", lambda doc, results: 1 / 0)
    found = evaluate(compared(("off",)), {"mmlu": broken, "gsm8k": fine})
    assert found[0].error == "ZeroDivisionError: division by zero" and "mmlu: not measured" in found[0].table()
    assert found[1].outcomes[0].questions == 6


def test_the_bound_of_a_certificate_stands_beside_the_loss(compared, tasks, engine):
    from TIDE.evals.evaluation import evaluate

    settings = Settings("exact", 0, 3, engine.config.max_exit_share, "float32")
    certificate = Certificate(0.3, 0.05, 0.95, "mismatch", 80, 8, settings)
    engine.policy.certificate = certificate
    (found,) = evaluate(compared(("fast",), ()), {"gsm8k": tasks["gsm8k"]})
    fast = found.outcomes[1]
    assert fast.certificate == dict(threshold=0.3, risk=0.05, confidence=0.95, loss="mismatch", prompts=80, new_tokens=8)
    assert (fast.loss.name, fast.loss.new_tokens) == ("mismatch", 8)
    assert "certificate: at most 0.05, with confidence 0.95, found on 80 prompts" in found.table()
    engine.policy.certificate = replace(certificate, settings=settings._replace(max_pending=1))
    assert contenders(engine, ["fast"])[1].certificate is None


def test_the_harness_makes_the_model_by_its_name(harness, model, router, plain, tmp_path, tasks, monkeypatch):
    import TIDE.evals.model  # registers it

    monkeypatch.setenv("TIDE_BACKEND", "modules")
    model.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path)
    arguments = dict(pretrained=str(tmp_path), router=str(router), mode="exact", max_new_tokens=8)
    found = harness.simple_evaluate(model="tide", model_args=arguments, tasks=[tasks["gsm8k"].task], bootstrap_iters=0, limit=2)
    assert found["results"]["gsm8k"]["exact_match,none"] in (0, 0.5, 1)
    assert TIDE.evals.model.Registered(pretrained=str(tmp_path), mode="off").shown.name == "off"
    assert TIDE.evals.model.Registered(pretrained=str(tmp_path)).shown.name == "off"
    with pytest.raises(ValueError, match="modes exact and fast need exits"):
        TIDE.evals.model.Registered(pretrained=str(tmp_path), mode="exact")


def test_options_that_the_engine_does_not_know_are_named(compared, engine):
    with pytest.raises(ValueError, match="expected generation options .* found num_beams"):
        compared(("off",)).asker.answer("generate_until", [("Why?", {"num_beams": 4})])


def test_sampled_texts_are_the_same_in_exact_and_off(compared, engine):
    lm = compared(("off", "exact"), ())
    asked = [("Why is it so?", {"do_sample": True, "temperature": 0.8, "until": []})]
    texts = []
    for contender in lm.compared:
        with engine.using(contender.config, contender.exits):
            texts.append(lm.asker.answer("generate_until", asked)[0].ids)
    assert texts[0] == texts[1]


def test_repeats_of_a_question_are_sampled_anew_and_alike_in_batches_of_any_size(harness, compared):
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = Dataset.from_list([{"prompt": f"Why {n}?", "answer": "So."} for n in range(3)])
    task = ConfigurableTask(
        config=dict(
            task="repeated",
            output_type="generate_until",
            test_split="test",
            custom_dataset=lambda **_: {"test": rows},
            doc_to_text="prompt",
            doc_to_target="answer",
            repeats=4,
            filter_list=[dict(name="all", filter=[dict(function="take_first_k", k=4)])],
            metric_list=[dict(metric="bypass")],
            generation_kwargs=dict(until=[], max_gen_toks=12, do_sample=True, temperature=1.0),
        )
    )
    found = {}
    for size in (1, 3, 4):
        lm = compared(("off", "exact"), (), rows=size)
        for contender in lm.compared:
            with lm.showing(contender):
                found[size, contender.name] = [one[0] for one in responses(harness, lm, "repeated", task)]
    assert all(len({*texts}) == 4 for texts in found[1, "off"])
    assert len({text for texts in found[1, "off"] for text in texts}) == 12
    assert all(texts == found[1, "off"] for texts in found.values())


def test_a_task_that_nobody_knows_is_named(harness, questions):
    with pytest.raises(ValueError, match="the harness has no task gsm9k"):
        chosen_tasks(["gsm9k", "gsm8k"], questions)


def test_stock_tasks_without_a_hub_are_told_and_the_others_are_measured(harness, compared, questions, monkeypatch):
    import datasets

    offline = []

    def unreachable(self, names):
        offline.append(bool(datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("no route")

    monkeypatch.setattr("lm_eval.tasks.TaskManager.load", unreachable)
    monkeypatch.setattr("TIDE.evals.tasks.hub_trouble", lambda: "it does not answer")
    with pytest.raises(RuntimeError, match=r"cannot load arc_easy: its data is on the hub, which cannot be reached \(it does"):
        chosen_tasks(["arc_easy"], None)
    monkeypatch.setattr("TIDE.evals.tasks.hub_trouble", lambda: None)
    with pytest.raises(RuntimeError, match="cannot load arc_easy: no route. Local tasks need no hub"):
        chosen_tasks(["arc_easy"], None)
    from TIDE.evals.evaluation import evaluate

    lost, fine = evaluate(compared(("off",)), chosen_tasks(["arc_easy", "gsm8k"], questions))
    assert fine.error is None and fine.outcomes[0].questions == 6
    assert "arc_easy: not measured. cannot load arc_easy: no route." in lost.table()
    assert offline[0] and offline[1] == bool(datasets.config.HF_HUB_OFFLINE)


@pytest.mark.parametrize("version", ["0.4.8", "0.5.0", "1.0"])
def test_a_harness_of_another_version_is_named(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=f"needs lm_eval 0.4.13 or later, below 0.5, found {version}. Install"):
        check_harness()


def test_a_harness_that_is_not_there_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        ImportError, match=r"which is not installed. Install it with: pip install 'lm_eval>=0.4.13,<0.5' 'datasets>="
    ):
        check_harness()
    for version in ("0.4.13", "0.4.13.post1", "0.4.14.dev0", "0.4.20"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, own=version: own)
        check_harness()
