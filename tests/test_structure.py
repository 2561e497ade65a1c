"""The shape of the code: imports point one way, every module has a docstring, importing is quiet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import TIDE

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "TIDE"
LEVEL = {
    "config": 0,
    "stats": 0,
    "disturbance": 0,
    "run": 0,
    "extras": 0,
    "version": 0,
    "kernels": 0,
    "hub": 1,
    "adapters": 1,
    "routing": 2,
    "engine": 3,
    "models": 3,
    "integrations": 4,
    "calibration": 5,
    "plots": 6,
    "evals": 6,
    "bench": 6,
    "server": 7,
    "the public surface": 8,
    "cli": 9,
}
# Exits in the prompt are one package, cut by the layers of the table that its files belong to; each has one door.
PROMPT_EXITS = {
    "routing": ("maps",),
    "engine": ("gathered", "slots", "prefill"),
    "calibration": ("moments", "effects", "fit"),
}
DOORS = {"maps": "routing/record.py", "prefill": "engine/engine.py", "fit": "calibration/calibrate.py"}
FILES = sorted(SOURCE.rglob("*.py"))
ENGINE = ["rows", "cache", "runners", "request", "round", "schedule", "host", "slots", "loop", "forward", "check", "select"]
ENGINE += ["warm_up", "batch", "engine"]  # a file or folder imports those before it


def part_of(module: str) -> str:
    """The part of TIDE that a module belongs to."""
    _, part, *inner = [*module.split("."), ""]
    if part == "prompt_exits":
        return next((layer for layer, names in PROMPT_EXITS.items() if inner[0] in names), "config")
    return part or "the public surface"


def test_imports_point_one_way():
    for file in FILES:
        module = module_of(file)
        for other in modules_imported(file) if module != "TIDE" else ():
            part, imported = part_of(module), part_of(other)
            assert imported == part or LEVEL[imported] < LEVEL[part], f"{module} imports {other}"


def test_exits_in_the_prompt_are_known_in_three_places():
    others = [file for file in FILES if not file.is_relative_to(SOURCE / "prompt_exits")]
    knowing = {str(file.relative_to(SOURCE)) for file in others if "prompt_exit" in file.read_text()}
    assert knowing == set(DOORS.values())
    for name, place in DOORS.items():
        inside = {module for module in modules_imported(SOURCE / place) if module.startswith("TIDE.prompt_exits")}
        assert inside == {f"TIDE.prompt_exits.{name}"}
    names = {name for layer in PROMPT_EXITS.values() for name in layer}
    assert names == {file.stem for file in (SOURCE / "prompt_exits").glob("*.py")} - {"__init__"}


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def modules_imported(file: Path) -> set[str]:
    """The modules of TIDE a file imports, for types or inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "TIDE":
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            found |= inside or {node.module or ""}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return found


MODULES = {module_of(file) for file in FILES}


def test_no_imports_go_round_in_circles():
    left = {module_of(file): modules_imported(file) - {module_of(file), "TIDE"} for file in FILES}
    while leaves := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in leaves}
    assert not left, f"these import each other, for types too: {sorted(left)}"


def test_inside_the_engine_too():
    files = [file for file in FILES if file.is_relative_to(SOURCE / "engine") and file.name != "__init__.py"]
    part = {module_of(file): file.relative_to(SOURCE / "engine").parts[0].removesuffix(".py") for file in files}
    assert set(part.values()) == set(ENGINE)
    for file in files:
        own = part[module_of(file)]
        for other in modules_imported(file) & part.keys():
            assert part[other] in (own, *ENGINE[: ENGINE.index(own)]), f"{file.name} of {own} imports {other}"


def test_kernels_for_one_card_have_one_door():
    """Versions of Triton do not all know the names in there."""
    inside = {name for name in MODULES if name.startswith("TIDE.kernels.hopper")}
    outside = [file for file in FILES if module_of(file) not in inside]
    assert {module_of(file) for file in outside if modules_imported(file) & inside} == {"TIDE.kernels.triton.long_passes"}


def test_every_module_has_a_docstring():
    texts = {file: file.read_text() for file in FILES}
    assert not [file for file, text in texts.items() if text and not ast.get_docstring(ast.parse(text))]


def fields_of(node: ast.ClassDef) -> set[str]:
    """What its methods assign to `self`."""
    return {
        own.attr
        for own in ast.walk(node)
        if isinstance(own, ast.Attribute) and isinstance(own.ctx, ast.Store) and ast.unparse(own.value) == "self"
    }


MOST_METHODS, MOST_FIELDS = 15, 12
LARGE = {  # the exceptions: a fourth is a class to split
    "TIDE",  # the public engine: its methods are the surface that users call
    "SegmentCache",  # transformers' Cache asks for a dozen methods of its own
    "Segments",  # to be split when its rows move to slots
}


def test_a_class_is_one_idea():
    large = set()
    for node in (node for file in FILES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ClassDef):
            methods = [own for own in node.body if isinstance(own, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) > MOST_METHODS or len(fields_of(node)) > MOST_FIELDS:
                large.add(node.name)
    assert large == LARGE


def test_importing_is_silent_and_brings_nothing_heavy():
    script = "import sys, TIDE; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_every_public_name_is_there_and_a_wrong_one_is_named():
    for name in TIDE.__all__:
        assert getattr(TIDE, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Tide'. It has"):
        _ = TIDE.Tide


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by name; two of one name are an error where all tests run."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()
