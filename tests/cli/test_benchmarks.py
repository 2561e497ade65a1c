"""The benchmarks run on a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import TIDE
from TIDE.prompt_exits.maps import SIGNALS, FittedPromptExit
from TIDE.routing.router import Router

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


def report(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_decoding_is_timed(warm):
    found = report(warm.run(FOLDER / "bench_decode.py", "--model", "tiny", "--new-tokens", 8, "--rounds", 2))
    assert found["same_text"] is True
    assert set(found["results"]) == {"model.generate", "TIDE, exits off"}


def test_sampling_is_timed(warm):
    asked = ("--model", "tiny", "--new-tokens", 8, "--prompts", 2, "--ways", "greedy", "sampled", "own processor")
    found = report(warm.run(FOLDER / "bench_sampling.py", *asked))
    assert set(found["speeds"]) == {"exits off, greedy", "exits off, sampled", "exits off, own processor"}
    assert not any(found["different"].values())


def test_rows_together_are_timed(warm):
    asked = ("--model", "tiny", "--rows", 1, 3, "--sets", 2, "--new-tokens", 4, "--rounds", 1)
    found = report(warm.run(FOLDER / "bench_batch.py", *asked))
    assert set(found["results"]) == {"1", "3"}
    assert set(found["results"]["3"]) == {"generate", "exits off"}
    assert all(own["tok_s"] > 0 and len(own["decoding_s"]) == 2 for own in found["results"]["3"].values())


def test_two_source_trees_are_compared(warm):
    root = FOLDER.parent
    asked = ("--before", root, "--model", "tiny", "--rows", 2, "--tokens", 20, "--new-tokens", 4, "--rounds", 1)
    found = report(warm.run(FOLDER / "compare_trees.py", *asked))
    assert found["same_texts"] is True
    assert all(times["ratio"] > 0 for times in found["results"].values())
    assert set(found["results"]) == {"off, 2 rows", "first of 20"}


def test_trees_are_timed_by_replay(warm):
    asked = ("--model", "tiny", "--trees", 7, "--new-tokens", 8, "--prompt-tokens", 16, "--levels", 2)
    found = report(warm.run(FOLDER / "bench_trees.py", *asked))["results"]
    assert set(found) == {"exits off", "2 in a row", "4 in a row", "7 in a row", "tree of 7"}
    assert found["exits off"]["tokens_a_round"] == 1.0 < found["tree of 7"]["tokens_a_round"]
    assert found["tree of 7"]["trees"] > 0 and found["tree of 7"]["tree_depth"] <= 2


def test_rows_together_are_timed_by_replay(warm):
    found = report(
        warm.run(FOLDER / "bench_trees.py", "--model", "tiny", "--rows", 3, "--new-tokens", 8, "--prompt-tokens", 16)
    )
    assert set(found["results"]) == {"exits off", "1 in a row", "2 in a row", "3 in a row"}
    assert found["results"]["3 in a row"]["tokens"] == 3 * 3 * 8
    assert found["results"]["3 in a row"]["tokens_a_round"] > found["results"]["1 in a row"]["tokens_a_round"] > 1


def test_the_cost_of_a_draft_is_measured(warm):
    asked = ("--model", "tiny", "--drafts", 1, 2, "--vocabulary", 64, "--new-tokens", 8, "--prompt-tokens", 16, "--rounds", 1)
    found = report(warm.run(FOLDER / "bench_drafts.py", *asked))["results"]["tiny"]
    assert set(found["256 tokens"]) == set(found["64 tokens"]) == {"1", "2"}
    assert {"round_ms", "of_a_step"} <= set(found["64 tokens"]["2"])


def test_the_first_tokens_of_prompts_are_timed(warm):
    (row,) = report(warm.run(FOLDER / "bench_prefill.py", "--model", "tiny", "--tokens", 40, "--rounds", 2))["results"]
    assert row["tokens"] == 40 and row["generate_ms"] > 0 and row["tide_ms"] > 0


def test_prompts_that_settle_by_force_are_timed(warm):
    asked = ("--model", "tiny", "--tokens", 40, "--rounds", 2, "--settle", 0.3)
    (row,) = report(warm.run(FOLDER / "bench_prefill.py", *asked))["results"]
    assert row["none_settle_ms"] > 0 and row["settle_ms"] > 0 and row["settle_less"] < 1


def test_perplexity_behind_prompts_that_settle_is_measured(warm, tmp_path):
    (tmp_path / "text.txt").write_text("".join(chr(97 + place * place % 23) for place in range(900)))
    files = ("--learn", tmp_path / "text.txt", "--measure", tmp_path / "text.txt", "--windows", 12, "--window", 40)
    asked = ("--model", "tiny", "--texts", 2, "--prompt", 24, "--follow", 8)
    (found,) = report(warm.run(FOLDER / "bench_settling.py", *files, *asked))["results"]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["none settle"]["settled"] == 0 and abs(rows["none settle"]["rise"]) < 1e-4
    assert rows["map, random 0.3"]["settled"] > 0.1


def test_the_parts_of_a_layer_are_timed(warm):
    found = report(warm.run(FOLDER / "bench_kernels.py", "--model", "tiny", "--layers", 2))["microseconds_and_share"]
    assert set(found) == {"1", "8", "16", "32", "64", "128"}
    assert all(took > 0 for parts in found.values() for took, _ in parts.values())


def test_kinds_of_heads_are_compared_and_an_interrupted_run_goes_on(warm, folder, tmp_path):
    asked = ("--model", folder, "--prompts", folder / "prompts.jsonl", "--keep", tmp_path, "--kinds", "memory", "eagle3")
    small = ("--texts", 20, "--answer", 12, "--tokens", 64, "--epochs", 1, "--every", 4)
    found = report(warm.run(FOLDER / "compare_heads.py", *asked, *small, "--seeds", 0))
    assert set(found["found"]) == {"memory, seed 0", "eagle3, seed 0"}
    assert all(len(one["agreement"]) == 3 for one in found["found"].values())
    again = report(warm.run(FOLDER / "compare_heads.py", *asked, *small, "--seeds", 0, 1, "--minutes", 0))
    assert again["found"] == found["found"], "what was measured is kept, and no further training is begun"
    assert (tmp_path / "eagle3.safetensors").exists()


def test_the_exits_of_a_file_are_measured_on_other_prompts(warm, folder, shared_router):
    asked = ("--router", shared_router, "--prompts", folder / "prompts.jsonl", "--model", folder, "--answer", 12)
    found = report(warm.run(FOLDER / "eval_exits.py", *asked))
    assert found["positions"] > 0
    for exit in found["exits"].values():
        assert exit["steps"][0] == pytest.approx(exit["agreement"], abs=1e-3)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of data sets with a few lines each."""
    folder = tmp_path_factory.mktemp("data")
    lines = {
        "spec_bench/question.jsonl": [{"category": "chat", "turns": [f"Say the number {n}."]} for n in range(4)],
        "gsm8k/test.jsonl": [{"question": "What is 1 + 1?", "answer": "#### 2"}],
        "mbpp/mbpp.jsonl": [{"text": "Add.", "code": "def add(a, b):\n    return a + b"}],
        "mmlu/test.jsonl": [{"question": "Which?", "choices": ["this", "that"], "answer": 1}],
    }
    for name, own in lines.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text("\n".join(map(json.dumps, own)))
    (folder / "wikitext2").mkdir()
    (folder / "wikitext2" / "test.txt").write_text(" = Title = \n\n Some prose about a thing .\n")
    return folder


@pytest.fixture
def other_data(data, tmp_path):
    """The same folder with other prompts and texts."""
    copied = Path(shutil.copytree(data, tmp_path / "other"))
    for path in (copied / "spec_bench" / "question.jsonl", copied / "wikitext2" / "test.txt"):
        path.write_text(path.read_text().replace("Say the", "Name the").replace("Some", "More"))
    return copied


@pytest.fixture
def prompt_exit_router(shared_router, tmp_path):
    """A router file with exits in the prompt, half of whose tokens stop at depth 2."""
    file = TIDE.RouterFile.load(shared_router)
    hidden = next(iter(file.exits.values())).router.down.in_features - 4
    point = {"kind": "plain", "threshold": 0.0, "share": 0.5, "rise": 0.0, "divergence": 0.0}
    file.prompt_exit = FittedPromptExit(2, Router(hidden, 8, SIGNALS), {}, 0.5, {"curve": [point]})
    file.save(path := tmp_path / "prompt_exit.safetensors")
    return path


def test_the_curve_has_every_way_and_goes_on(warm, folder, shared_router, prompt_exit_router, data, other_data, tmp_path):
    asked = ("--model", folder, "--memory", shared_router, "--data", data, "--prompts", 2, "--new-tokens", 4)
    asked += ("--threshold", 0.5, "--router", f"lens={tmp_path / 'none.safetensors'}", "--router", f"own={prompt_exit_router}")
    places = ("--work", tmp_path / "work", "--out", tmp_path, "--figure", tmp_path / "new" / "curve.svg")
    for _ in range(2):
        done = warm.run(FOLDER / "curve.py", *asked, *places)
        assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "curve.json").read_text())["table"]
    kinds = {"exits off", "exact", "fast, own, 0.5", "fast, memory, 0.5"}
    kinds |= {"fast, memory, propagate, 0.5", "fast, memory, zero_pad, 0.5"}
    assert kinds < {*table} and any(name.startswith("static") for name in table)
    assert table["exact"]["quality"] == 1.0 and table["exits off"]["layers"] == 4.0
    settled = table["prefill exits, own, 50%"]  # with a threshold of 0 all do but the first and the last
    assert settled["settled"] > 0.5 and settled["layers"] == 4.0 and settled["exits"] == 0 and table["exact"]["settled"] == 0
    assert "fast, lens: not measured" in done.stdout and (tmp_path / "new" / "curve.svg").exists()
    answers = (tmp_path / "work" / "curve.jsonl").read_text().splitlines()
    assert len(answers) == 1 + 2 * len(table)
    of_memory = [name for name in table if name == "exact" or name.startswith("fast, memory")]
    done = warm.run(FOLDER / "curve.py", *(prompt_exit_router if word is shared_router else word for word in asked), *places)
    assert done.returncode == 0, done.stderr
    more = (tmp_path / "work" / "curve.jsonl").read_text().splitlines()[len(answers) :]
    assert len(more) == 2 * (len(of_memory) + 1), "those of the other memory file, which has exits in the prompt besides"
    done = warm.run(FOLDER / "curve.py", *(other_data if word is data else word for word in asked), *places)
    assert done.returncode != 0 and "begun with other settings: found asked" in done.stderr


STUDIES = {
    "determinism": ("--runs", 3, "--new-tokens", 6, "--rows", 3),
    "slowdown": ("--prompts", 2, "--steps", 1, "--new-tokens", 6, "--rounds", 1),
    "shallow": ("--prompts", 2, "--steps", 1, "--new-tokens", 6, "--threshold", 0.0),
    "convergence": ("--tokens", 100, "--depths", 1, 3),
    "thresholds": ("--new-tokens", 3, "--threshold", 0.5),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_its_figures_and_does_not_go_on_with_other_exits_or_data(
    warm, folder, shared_router, prompt_exit_router, data, other_data, tmp_path, name
):
    def run(router, data):
        asked = (name, "--model", folder, "--router", router, "--data", data, *STUDIES[name])
        return warm.run(FOLDER / "study.py", *asked, "--work", tmp_path / "work", "--out", tmp_path)

    done = run(shared_router, data)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / f"study-{name}.json").read_text())
    figures = found["figures"]
    if name == "determinism":
        assert figures["same"] == figures["runs"] == 3 and figures["texts_of_seeds"] > 1
    elif name == "slowdown":
        assert figures["same_texts"] == figures["texts"] == 6
    elif name == "shallow":
        assert figures["loss_after"] >= figures["loss_before"] and figures["exits_after"] > 0
    elif name == "thresholds":
        assert found["table"]["exact"]["texts of exits off"] == figures["prompts"] == 16
        assert {*found["table"]} == {"exits off", "exact", "fast, 0.5"}
    else:
        assert found["table"]["all"]["tokens"] == figures["tokens"] > 50
        assert found["table"]["all"]["depth 1"] <= found["table"]["all"]["depth 3"] <= 1
    if name != "convergence":
        done = run(prompt_exit_router, data)
        assert done.returncode != 0 and "begun with other settings: found router " in done.stderr
    if name not in ("determinism", "thresholds"):  # which have prompts of their own
        done = run(shared_router, other_data)
        changed = "texts" if name == "convergence" else "asked"
        assert done.returncode != 0 and f"begun with other settings: found {changed} " in done.stderr


@pytest.fixture(scope="module")
def more_data(data, tmp_path_factory):
    """The same data sets with enough prompts to train on."""
    folder = Path(shutil.copytree(data, tmp_path_factory.mktemp("more") / "data"))
    chat = [{"category": "writing", "turns": [f"Write about the number {n}."]} for n in range(12)]
    code = [{"text": f"Add {n}.", "code": "def add(a):\n    return a"} for n in range(12)]
    for name, lines in (("spec_bench/question.jsonl", chat), ("mbpp/mbpp.jsonl", code)):
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    return folder


TRAINING = {
    "routers": ("--texts", 12, "--answer", 16),
    "placement": ("--quick", "--strategy", "identity", "--interval", 2),
    "quantized": ("--prompts", 2, "--new-tokens", 6),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_study_that_trains_or_quantizes_writes_its_figures(warm, folder, shared_router, more_data, tmp_path, name):
    asked = (name, "--model", folder, "--router", shared_router, "--data", more_data, *TRAINING[name])
    done = warm.run(FOLDER / "study.py", *asked, "--work", tmp_path / "work", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / f"study-{name}.json").read_text())
    table, figures = found["table"], found["figures"]
    if name == "routers":
        assert len(table) == 8 and all(0 <= own["AUROC, prose"] <= 1 for own in table.values())
        wide, narrow = (table[f"prose, width {width}"]["AUROC, prose"] for width in (512, 32))
        assert figures["texts"] == [12, 12] and figures["auroc_by_width"] == pytest.approx(wide - narrow, abs=2e-3)
    elif name == "placement":
        assert figures["identity_seconds"] > 0 and any(row.startswith("identity, exits at") for row in table)
    else:
        own = table["as it is"]
        assert own["exact is exits off"] == own["texts of the model before"] == figures["prompts"] == 2


def test_the_bound_is_what_adversaries_cost_at_least(warm, tmp_path):
    asked = ("bound", "--tokens", 300, "--tries", 20, "--work", tmp_path, "--out", tmp_path)
    done = warm.run(FOLDER / "study.py", *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "study-bound.json").read_text())
    table, figures = found["table"], found["figures"]
    for name in ("host", "rounds"):
        nothing, search = (table[f"{name}, {kind}"]["× exits off"] for kind in ("nothing is accepted", "search"))
        assert 0.8 < figures[f"worst_{name}"] == search <= nothing < 1
    assert "a simulation" in found["note"]


def test_a_study_names_data_that_is_missing(warm, folder, shared_router, tmp_path):
    asked = ("shallow", "--model", folder, "--router", shared_router, "--work", tmp_path, "--out", tmp_path)
    done = warm.run(FOLDER / "study.py", *asked, "--data", tmp_path)
    assert done.returncode != 0 and f"there is no {tmp_path / 'spec_bench/question.jsonl'}" in done.stderr
    (tmp_path / "spec_bench").mkdir()
    for line, said in (("{", "line 1 is not JSON"), ('{"turns": []}', "record 1 lacks what is asked or answered")):
        (tmp_path / "spec_bench" / "question.jsonl").write_text(line)
        done = warm.run(FOLDER / "study.py", *asked, "--data", tmp_path)
        assert done.returncode != 0 and said in done.stderr
