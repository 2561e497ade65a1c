"""Kernels that begin before the one ahead of them has ended: each waits in time, and only cards that can do it launch so."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest
import torch

from compiling import compiling
from TIDE.kernels.triton.tiles import Card, overlaps

launch = pytest.importorskip("TIDE.kernels.triton.launch")

FILES = sorted(Path(launch.__file__).parent.glob("*.py"))
FUNCTIONS = [node for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
KERNELS = {node.name: node for node in FUNCTIONS if any(ast.unparse(own) == "kernel" for own in node.decorator_list)}
MEMORY = {"tl.load", "tl.store", "tl.atomic_add"}
DEVICE = {node.name: node for node in FUNCTIONS if any(ast.unparse(own) == "triton.jit" for own in node.decorator_list)}
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from TIDE.kernels.triton.products import _norm

constants = dict(OFFSET=0.0, LAYER_NORM=False, HAS_BIAS=False, HAS_BASE=True, BLOCK=64, PDL=2)
kinds = {**dict.fromkeys(constants, "constexpr"), "width": "i32", "eps": "fp32", "scale": "fp32"}
signature = {name: kinds.get(name, "*bf16") for name in _norm.compiled.arg_names}
made = triton.compile(ASTSource(_norm.compiled, signature, constants), GPUTarget("cuda", 90, 32), {"launch_pdl": True})
print(made.metadata.launch_pdl)
print(made.asm["ptx"])
"""
READ = """
import importlib, sys
from triton.runtime.jit import JITFunction
from TIDE.kernels.triton.launch import kernel

for name in sys.argv[1:]:
    for own in vars(importlib.import_module(f"TIDE.kernels.{name}")).values():
        own = own.compiled if isinstance(own, kernel) else own
        if isinstance(own, JITFunction):
            print(own.fn.__name__, own.cache_key)
"""


def touches_memory(node: ast.AST) -> bool:
    """True if a statement loads or stores, itself or in a device function that it calls, or returns."""
    if any(isinstance(own, ast.Return) for own in ast.walk(node)):
        return True
    names = {ast.unparse(own.func) for own in ast.walk(node) if isinstance(own, ast.Call)}
    return bool(names & MEMORY) or any(reads(DEVICE[name]) for name in names & DEVICE.keys() - {"begin", "looped", "fetch"})


def reads(function: ast.FunctionDef) -> bool:
    calls = {ast.unparse(own.func) for own in ast.walk(function) if isinstance(own, ast.Call)}
    return bool(calls & MEMORY) or any(reads(DEVICE[name]) for name in calls & DEVICE.keys() - {function.name})


def calls_looped(function: ast.FunctionDef) -> bool:
    calls = {ast.unparse(own.func) for own in ast.walk(function) if isinstance(own, ast.Call)}
    return "looped" in calls or any(calls_looped(DEVICE[name]) for name in calls & DEVICE.keys() - {function.name})


def test_every_kernel_that_is_launched_is_one_that_waits():
    launched = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                launched.add(node.func.value.id)
    assert launched == KERNELS.keys() and len(launched) > 20


@pytest.mark.parametrize("name", KERNELS)
def test_every_program_waits_before_it_reads_writes_or_returns(name):
    kernel = KERNELS[name]
    assert kernel.args.args[-1].arg == "PDL"
    body = [ast.unparse(node) for node in kernel.body]
    waits = [index for index, text in enumerate(body) if text.startswith("begin(PDL")]
    assert len(waits) == 1, "every program comes by, so it is in no branch"
    assert not any(touches_memory(node) for node in kernel.body[: waits[0]])
    assert ("LOOPS=True" in body[waits[0]]) == calls_looped(kernel), "the next one may begin"


def test_triton_can_read_every_kernel():
    """What its oldest version cannot read, such as `a, (b, c) = …`, fails when a kernel is launched for the first time."""
    both = (*FILES, *(FILES[0].parents[1] / "hopper").glob("*.py"))
    files = [f"{file.parent.name}.{file.stem}" for file in both]
    names = {line.split()[0] for line in compiling(READ, *files)}
    assert names > KERNELS.keys() | DEVICE.keys()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), False), ((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)],
)
def test_cards_from_9_0_on_launch_early(capability, expected, monkeypatch):
    card, seen = Card(capability, 99 * 1024, 100), []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **options: seen.append((grid, given, options))

    assert overlaps(card) == expected
    monkeypatch.setattr(launch, "card_of", lambda device: card)
    own = launch.kernel(lambda x, PDL: None)
    own.compiled, own._is_interpreted = Recorder(), False
    for tokens, when in ((1, launch.LATE), (32, launch.LATE), (33, launch.AFTER), (64, launch.AFTER), (65, launch.NEVER)):
        x = torch.zeros(tokens, 3)
        own[(3,)](x, 5, num_warps=4)
        is_early = expected and when is not launch.NEVER
        options = dict(PDL=when.value, launch_pdl=True) if is_early else dict(PDL=launch.NEVER.value)
        assert seen.pop() == ((3,), (x, 5), dict(num_warps=4, **options))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU, and kernels run on it")
def test_the_interpreter_never_waits():
    own = launch.kernel(lambda x, PDL: None)
    seen = {}
    own.compiled = {(1,): lambda x, **options: seen.update(options)}
    own[(1,)](torch.zeros(1))
    assert seen == {"PDL": launch.NEVER.value}


@pytest.mark.full
def test_compiled_code_waits_before_it_loads():
    is_early, *lines = compiling(COMPILED)
    assert is_early == "True"
    found = [word for line in lines for word in ("griddepcontrol.wait", "ld.global", "st.global") if word in line]
    assert (
        found[0] == "griddepcontrol.wait" and found.count("griddepcontrol.wait") == 1 and {"ld.global", "st.global"} <= {*found}
    )


def test_the_script_that_compiles_kernels_for_cards_knows_their_parameters(monkeypatch):
    """It gives every constant, and no number is taken for an array."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent.parent / "benchmarks")
    cards = importlib.import_module("check_cards")
    for name, (own, constants, _) in cards.launches(Card((9, 0), 227 * 1024, 132), "bf16", 128, 16).items():
        node = KERNELS[own.compiled.fn.__name__]
        wanted = {part.arg for part in node.args.args if part.annotation is not None}
        assert constants.keys() | {"PDL"} == wanted, name
        numbers = {part.arg for part in node.args.args} & {*launch.NUMBERS}
        assert all(cards.type_of(number, "bf16") == "i32" for number in numbers), name
