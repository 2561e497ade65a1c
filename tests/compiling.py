"""Triton's compiler, in a process of its own: in those of tests kernels may run in its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def compiling(program: str, *arguments: object) -> list[str]:
    """Return the lines of a program that uses Triton's compiler, not its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


GLUON = """
import json, subprocess, sys
from triton.backends.nvidia.compiler import get_ptxas
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

*given, path = sys.argv[1:]
SOURCE
found = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
with open(path, "w") as file:
    file.write(found.asm["ptx"])
command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", path, "-o", path + ".cubin"]
said = subprocess.run(command, capture_output=True, text=True, check=True)
print(json.dumps([found.metadata.shared, said.stdout + said.stderr]))
"""


def compiled_for_hopper(source: str, *given: object) -> tuple[int, str]:
    """Compile the Gluon kernel that lines of Python name as `source`; return its shared memory and what ptxas says.

    Args:
        given: what these lines find in `given`, as strings, and last the path of a file to write.
    """
    shared, said = json.loads(compiling(GLUON.replace("SOURCE", source), *given)[-1])
    return shared, said
