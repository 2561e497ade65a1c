"""`tide analyze`: table, JSON and figure of a tiny model, or a line that says why not."""

from __future__ import annotations

import importlib.util
import json

from commands import tide
from families import LAYERS


def test_it_prints_a_table(folder):
    done = tide("analyze", folder, "--dataset", folder / "texts.txt", "--samples", 4, "--no-heads")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert f"{LAYERS} layers" in lines[0] and "of 4 texts" in lines[0]
    assert lines[2].split() == ["depth", "cosine", ">", "0.98", "identity"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert "mean depth needed by an oracle" in lines[-1]


def test_json_has_the_heads_too_and_the_figure_is_drawn(folder, tmp_path):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    figure = ["--figure", tmp_path / "out.png"] if has_matplotlib else []
    done = tide("analyze", folder, "--dataset", folder / "texts.txt", "--quick", "--json", *figure)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["depth"] for row in found["rows"]] == [0, 1, 2, 3]
    assert found["rows"][0]["memory"] is not None
    assert set(found["oracle_depth"]) == {"identity", "memory"}, "a lens has no candidate in so shallow a model"
    assert (tmp_path / "out.png").exists() == has_matplotlib
