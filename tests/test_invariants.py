"""What must always hold: ten promises, each proved by tests that carry its number as a marker, `@pytest.mark.invariant(3)`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

INVARIANTS = {
    1: "exits never taken: tokens and logits are the model's, in every family",
    2: "after catch-up K/V are those of a full run, in every family that owns K/V",
    3: "mode exact: greedy text is that of `model.generate`, whatever exits say; samples follow the model's distribution",
    4: "`layers_run` is what hooks on the layers count; a token that exits does not run the rest unless it is caught up",
    5: "a row in a batch is the row alone, whatever its neighbours do",
    6: "what a router sees in calibration is what it sees in the engine",
    7: "every kernel gives what its reference gives",
    8: "the model handed in is unchanged after `engine.close()`, and a second engine works",
    9: "same seed, same text",
    10: "bad input gives a clear error that names the next step, and leaves engine and model usable",
}


def marked(tree: ast.AST) -> list[int]:
    """The numbers of the markers of a file that are put on something: decorators and `pytestmark`."""
    places = [decorator for node in ast.walk(tree) for decorator in getattr(node, "decorator_list", [])]
    places += [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and _names(node) == ["pytestmark"]]
    calls = [call for place in places for call in ast.walk(place) if isinstance(call, ast.Call)]
    return [call.args[0].value for call in calls if ast.unparse(call.func) == "pytest.mark.invariant"]


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def test_every_invariant_is_proved():
    folder = Path(__file__).parent
    found = {number: [] for number in INVARIANTS}
    for path in sorted(folder.rglob("test_*.py")):
        for number in marked(ast.parse(path.read_text(encoding="utf-8"))):
            found[number].append(path.name)  # a number that is none of the ten is a KeyError
    assert all(found.values()), {number: INVARIANTS[number] for number, files in found.items() if not files}
    assert said_in_docs() == {number: set(files) for number, files in found.items()}


def said_in_docs() -> dict[int, set[str]]:
    """The files of each promise, by the table in docs/structure.md."""
    text = (Path(__file__).parent.parent / "docs" / "structure.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    names = {int(number): re.sub(r"\w+: ", "", files.replace(";", ",")).split(",") for number, files in rows}
    return {number: {f"test_{name.strip()}.py" for name in own} for number, own in names.items()}


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        ("@pytest.mark.invariant(3)\ndef test(): ...", [3]),
        ("pytestmark = [pytest.mark.invariant(1), pytest.mark.real]", [1]),
        ("pytestmark = pytest.mark.invariant(10)", [10]),
        ("found = pytest.mark.invariant(2)\n'@pytest.mark.invariant(4)'", []),
    ],
)
def test_markers_are_found_where_they_are_put_on_something(source, numbers):
    assert marked(ast.parse(source)) == numbers
