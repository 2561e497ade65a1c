"""Imports what scripts need, then runs scripts: each in a child process, as `python script arguments` would.

A request is a line of JSON: argv, cwd and the files that are the child's standard streams. The answer is its exit code. The
first line that comes out says what importing TIDE took, as a share of what torch and transformers took before it, and what it
brought along.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not survive a fork


def imports() -> dict[str, object]:
    began = time.process_time()
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, pipelines  # noqa: F401

    before, there = set(sys.modules), time.process_time()
    import TIDE

    for name in TIDE.__all__:
        getattr(TIDE, name)
    share = (time.process_time() - there) / (there - began)
    assert torch.get_num_threads() == 1
    return dict(share=share, packages=sorted({name.split(".")[0] for name in set(sys.modules) - before}))


def become(argv: list[str], cwd: str, streams: list[str]) -> None:
    for number, name in enumerate(streams):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)


def outcome() -> int:
    """The exit code of the script."""
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
print(json.dumps(imports()), file=answers, flush=True)
with suppress(ImportError):  # numba is an option; TIDE's own compiled code would start threads
    import numba  # noqa: F401
gc.freeze()  # what is there already is not looked through again by every child
for request in requests:
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
        continue
    become(**json.loads(request))
    code = outcome()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch down would take longer than most scripts run
