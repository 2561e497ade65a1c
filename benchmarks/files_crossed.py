"""Which files a warm greedy request crosses, in the order of first entry: a measure of how far a reader has to follow.

    python benchmarks/files_crossed.py                 the embedded model and its router on this CPU
    python benchmarks/files_crossed.py --slots         a tiny model on slots, with the references in place of kernels

Prints the number of files and their names, then those of one steady round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import TIDE
from TIDE.run import prepared

HERE = Path(__file__).resolve().parents[1]
ROOT = f"{Path(TIDE.__file__).parent}/"
OPTIONS = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)


def crossed(work: Callable[[], object]) -> list[str]:
    """Return the files of the package that have a function called."""
    found: dict[str, None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.setdefault(frame.f_code.co_filename.removeprefix(ROOT))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(found)


def embedded() -> tuple[TIDE.TIDE, torch.Tensor]:
    model, tokenizer = TIDE.load_model("default", dtype=torch.float32)
    return TIDE.TIDE(model, TIDE.default_router()), prepared(tokenizer, "Name three colours.")["input_ids"]


def on_slots() -> tuple[TIDE.TIDE, torch.Tensor]:
    sys.path.insert(0, str(HERE / "tests"))
    from families import build
    from router_files import exits_of
    from runners import on_references

    model = build("llama")
    return on_references(TIDE.TIDE(model, exits_of(model, "memory", 0))), torch.arange(3, 23)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", action="store_true")
    engine, ids = on_slots() if parser.parse_args().slots else embedded()
    for _ in range(2):
        engine.generate(ids, **OPTIONS)
    files = crossed(lambda: engine.generate(ids, **OPTIONS))
    print(f"request: {len(files)} files: {' '.join(files)}")
    stream = engine.stream(ids, **OPTIONS)
    for _ in range(8):
        next(stream)
    files = crossed(lambda: [next(stream) for _ in range(4)])
    print(f"steady rounds: {len(files)} files: {' '.join(files)}")
    stream.close()


if __name__ == "__main__":
    main()
