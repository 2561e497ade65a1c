"""Studies of exits: questions about TIDE that a table of speeds does not answer.

    python benchmarks/study.py determinism [--runs 100]
    python benchmarks/study.py slowdown --data DIR
    python benchmarks/study.py bound
    python benchmarks/study.py shallow --data DIR
    python benchmarks/study.py thresholds
    python benchmarks/study.py convergence --data DIR [--tokens 300000]
    python benchmarks/study.py routers --data DIR
    python benchmarks/study.py placement
    python benchmarks/study.py quantized --data DIR

What is done is kept in WORK/NAME.jsonl, so a study that was broken off, or that is given a larger size, goes on from there.
The figures go to OUT/study-NAME.json, in the form of docs/results. DIR is a folder of data sets as `tide eval --data` reads it.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

STUDIES = ("determinism", "slowdown", "shallow", "thresholds", "convergence", "routers", "placement", "quantized", "bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = parser.add_subparsers(dest="study", required=True, metavar="NAME")
    for name in STUDIES:
        own = named.add_parser(name)
        own.add_argument("--data", type=Path, default=None, metavar="DIR")
        own.add_argument("--model", default="default")
        own.add_argument("--router", default=None, help="None: the one of the embedded default")
        own.add_argument("--work", type=Path, default=Path("studies"), metavar="DIR", help="where unfinished work is kept")
        own.add_argument("--out", type=Path, default=Path("docs/results"), metavar="DIR")
        importlib.import_module(f"studies.{name}").add_arguments(own)
    options = parser.parse_args()
    study = importlib.import_module(f"studies.{options.study}")

    import transformers

    from kept import results_file

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = study.run(options)
    path = options.out / f"study-{options.study}.json"
    results_file(path, found)
    for row, columns in found.get("table", {}).items():
        print(f"{row:40} " + "  ".join(f"{name} {value}" for name, value in columns.items()))
    print("\n".join(f"{name}: {value}" for name, value in found.get("figures", {}).items()))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
