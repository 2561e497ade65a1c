"""Long measurements: what is done is kept, what fails is named, and the rest goes on."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import kept
    import results

    yield kept, results
    for name in ("kept", "results"):
        del sys.modules[name]


def test_work_that_was_broken_off_goes_on(benchmarks, tmp_path):
    kept, _ = benchmarks
    path, calls = tmp_path / "new" / "work.jsonl", []

    def work(n):
        calls.append(n)
        return {"n": n}

    first = kept.Kept(path, {"size": 3})
    assert [first.once(str(n), lambda n=n: work(n))["n"] for n in (1, 2)] == [1, 2]
    with path.open("a") as file:
        file.write('{"key": "3", "rec')  # cut off
    again = kept.Kept(path, {"size": 3})
    assert [again.once(str(n), lambda n=n: work(n))["n"] for n in (1, 2, 3)] == [1, 2, 3] and calls == [1, 2, 3]
    with pytest.raises(SystemExit, match=r"begun with other settings: found size 4 instead of 3\. Use the same ones"):
        kept.Kept(path, {"size": 4})


def test_results_have_the_fields_of_docs_and_no_path_of_this_machine(benchmarks, tmp_path, monkeypatch):
    kept, _ = benchmarks
    monkeypatch.setattr(sys, "argv", ["study.py", "shallow", "--data", "/home/me", "--work", "/tmp/w", "--steps", "3"])
    kept.results_file(tmp_path / "study.json", {"what": "x", "settings": "y", "figures": {"a": 1}})
    found = json.loads((tmp_path / "study.json").read_text())
    assert {"what", "command", "commit", "date", "hardware", "software", "settings", "figures"} == {*found}
    assert found["command"] == "python benchmarks/study.py shallow --data DIR --steps 3"


def run(results, monkeypatch, tmp_path, parts, *words):
    monkeypatch.setattr(results, "parts", lambda *_: parts)
    monkeypatch.setattr(sys, "argv", ["results.py", "gpu", "--data", str(tmp_path), "--out", str(tmp_path / "out"), *words])
    return results.main()


def test_a_part_that_fails_or_lacks_data_is_named_and_the_others_go_on(benchmarks, tmp_path, monkeypatch, capfd):
    _, results = benchmarks
    fails = results.Part("fails", ["-c", "import sys; print('half'); sys.exit(3)"])
    silent = results.Part("silent", ["-c", "print('no numbers')"])
    lacks = results.Part("lacks", ["-c", "print(1)"], ("none.jsonl",))
    works = results.Part("works", ["-c", "print('a table'); print('{\"x\": 2}')"])
    assert run(results, monkeypatch, tmp_path, [fails, silent, lacks, works]) == 1
    said = capfd.readouterr().out
    assert "fails: not measured: it ended with code 3" in said and "silent: not measured: it printed no JSON" in said
    assert f"lacks: not measured: there is no {tmp_path / 'none.jsonl'}" in said
    assert (tmp_path / "out" / "fails.txt").read_text() == "half\n"
    done = json.loads((tmp_path / "out" / "works.done.json").read_text())
    assert done["result"] == {"x": 2} and {"commit", "hardware", "date", "minutes"} <= {*done}


def test_figures_of_the_models_own_modules_are_not_taken_for_ours(benchmarks, tmp_path, monkeypatch, capfd):
    from TIDE.engine.select import checked

    _, results = benchmarks
    part = results.Part("slow", ["-c", f"import sys; print('as it is, {results.WITHOUT_LAYERS}', file=sys.stderr); print(1)"])
    assert run(results, monkeypatch, tmp_path, [part]) == 1
    said = capfd.readouterr()
    assert "slow: not measured: it ran on the model's own modules (as it is" in said.out and "as it is" in said.err
    assert results.WITHOUT_LAYERS in inspect.getsource(checked)


def test_a_part_that_is_there_is_not_run_again_unless_asked_for(benchmarks, tmp_path, monkeypatch, capfd):
    _, results = benchmarks
    count = tmp_path / "count"
    part = results.Part("counts", ["-c", f"open({str(count)!r}, 'a').write('.'); print(1)"])
    for words in ([], [], ["--again", "counts"], ["--part", "counts"]):
        assert run(results, monkeypatch, tmp_path, [part], *words) == 0
    assert count.read_text() == ".."
    assert run(results, monkeypatch, tmp_path, [results.Part("other", ["-c", "print(1)"])], "--minutes", "0") == 1
    assert "other: not measured: 0 minutes are over. The same command goes on." in capfd.readouterr().out
    with pytest.raises(SystemExit):
        run(results, monkeypatch, tmp_path, [part], "--part", "nothing")


def test_a_part_of_another_command_is_named(benchmarks, tmp_path, monkeypatch, capfd):
    _, results = benchmarks
    assert run(results, monkeypatch, tmp_path, [results.Part("one", ["-c", "print(1)"])]) == 0
    assert run(results, monkeypatch, tmp_path, [results.Part("one", ["-c", "print(2)"])]) == 1
    assert "one.done.json is of -c print(1). Add --again one, or give another --out" in capfd.readouterr().out
    assert run(results, monkeypatch, tmp_path, [results.Part("one", ["-c", "print(2)"])], "--again", "one") == 0


def test_parts_of_other_data_another_machine_or_other_code_are_refused(benchmarks, tmp_path, monkeypatch):
    from TIDE.evals import machine

    kept, results = benchmarks
    (tmp_path / "asked.txt").write_text("one")
    part = results.Part("one", ["-c", "print(1)"], ("asked.txt",))
    for _ in range(2):
        assert run(results, monkeypatch, tmp_path, [part]) == 0
    (tmp_path / "asked.txt").write_text("another")
    with pytest.raises(SystemExit, match=r"out has parts .* expected asked\.txt as now .* Give another --out\."):
        run(results, monkeypatch, tmp_path, [part])
    (tmp_path / "asked.txt").write_text("one")
    hardware, identity = machine.hardware(), kept.identity
    with monkeypatch.context() as changed:
        changed.setattr(machine, "hardware", lambda: hardware | {"cpu": "another"})
        with pytest.raises(SystemExit, match="expected machine as now"):
            run(results, changed, tmp_path, [part])
    with monkeypatch.context() as changed:
        changed.setattr(kept, "identity", lambda of: identity(of) + ("" if isinstance(of, Path) else "x"))
        with pytest.raises(SystemExit, match="expected code as now"):
            run(results, changed, tmp_path, [part])
    assert run(results, monkeypatch, tmp_path, [part]) == 0
    (tmp_path / "out" / "settings.json").unlink()
    with pytest.raises(SystemExit, match="expected code, machine as now"):
        run(results, monkeypatch, tmp_path, [part])


def test_parts_name_scripts_and_options_that_exist(benchmarks, tmp_path, monkeypatch):
    import typer

    from TIDE.cli.app import app

    _, results = benchmarks
    commands = typer.main.get_command(app).commands
    for name in ("cpu", "gpu", "quality"):
        for part in results.parts(name, tmp_path, tmp_path, rows=16):
            if part.words[0].endswith(".py"):
                text = (FOLDER / part.words[0]).read_text()
                assert all(f'"{word}"' in text for word in part.words if word.startswith("--")), part
            else:
                known = {option for own in commands[part.words[2]].params for option in own.opts}
                assert {word for word in part.words[3:] if word.startswith("-")} <= known, part


def test_the_router_files_of_a_part_are_written_by_parts_before_it(benchmarks, tmp_path):
    _, results = benchmarks
    for name in ("gpu", "quality"):
        written = set()
        for part in results.parts(name, tmp_path, tmp_path / "out"):
            pairs = list(zip(part.words, part.words[1:], strict=False))
            assert {value.rpartition("=")[2] for word, value in pairs if word == "--router"} <= written, part
            written |= {value for word, value in pairs if word == "-o"}
        if name == "gpu":
            (curve,) = [part for part in results.parts(name, tmp_path, tmp_path / "out") if part.name == "curve-gpu"]
            assert curve.words.count("--router") == 3


def test_ratios_stand_beside_those_of_the_readme(benchmarks, tmp_path):
    _, results = benchmarks
    ratios = {"off/generate": 1.8, "exact/off": 1.0, "exact/generate": 2.3}
    counts = dict(prompts=20, exact_is_exits_off=20, with_generate=20, all_the_same=19)
    found = {"result": {**counts, "tok/s": {"all": ratios}}}
    (tmp_path / "exact.done.json").write_text(json.dumps(found))
    lines, failed = results.compared(tmp_path)
    assert [line.split()[-1] for line in lines[1:5]] == ["yes", "NO", "yes", "NO"] and "19 of 20" in lines[4]
    assert failed == ["Spec-Bench, exact / off", "texts"]


def test_figures_that_do_not_hold_are_no_success(benchmarks, tmp_path, monkeypatch, capfd):
    _, results = benchmarks
    readme = json.loads((FOLDER.parent / "docs/results/exact-arm.json").read_text())["table"]["all"]
    ratios = {key.replace(" ", ""): value for key, value in readme.items() if " / " in key}
    for same, code in ((20, 0), (1, 1)):
        found = dict(prompts=20, exact_is_exits_off=same, with_generate=20, all_the_same=20) | {"tok/s": {"all": ratios}}
        part = results.Part("exact", ["-c", f"print({json.dumps(found)!r})"])
        monkeypatch.setattr(results, "parts", lambda *_, part=part: [part])
        words = ["results.py", "cpu", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--again", "exact"]
        monkeypatch.setattr(sys, "argv", words)
        assert results.main() == code
    assert "not as in the README: texts." in capfd.readouterr().out
