"""The figures of the README and the docs, measured again: one command, in parts that are kept and can be resumed.

    python benchmarks/results.py cpu --data DIR         the README's CPU figures: every twelfth prompt, 20 minutes on 2 cores
    python benchmarks/results.py gpu --data DIR         those of a GPU; --minutes 9 begins no further part after that time
    python benchmarks/results.py quality --data DIR     GSM8K (200), HumanEval (82), MMLU (1,000), WikiText-2; a certificate
    python benchmarks/results.py cpu --data DIR --part exact

DIR has the data sets as `tide eval --data` reads them, and spec_bench/question.jsonl. Every part is a process of its own; what
it prints at the end goes to OUT/PART.done.json with command, commit, hardware and date as soon as it is done. A part that is
there is not run again (--again PART: it is). All parts of OUT are of the same code, machine and data, which OUT/settings.json
keeps; with others OUT is refused. A part that fails, whose data is missing, or that is there from another command, is named,
and the others go on; the exit code is 1 then, and where a figure or a text is not as in the README.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

HERE = Path(__file__).parent
TIDE = ["-m", "TIDE.cli.app"]
PROMPTS = "spec_bench/question.jsonl"
CHOSEN = 20  # prompts of the CPU's run: every twelfth of 240
WITHOUT_LAYERS = "without compiled layers"  # engines say so of models that TIDE compiles here, if a kernel fails
SPREAD = 0.15  # of a ratio on another machine of the same kind, or in another hour
SIZES = {"gsm8k": 200, "humaneval": 82, "mmlu": 1000, "wikitext": None}  # questions; None: all
ASKED = dict(gsm8k="gsm8k/test", humaneval="humaneval/humaneval", mmlu="mmlu/test", wikitext="wikitext2/test")  # files
DEEP = ("--min-layers", "18", "--checkpoint-interval", "4")
CURVE = {  # router files of the curve, besides the shipped one, and how they are calibrated
    "lens": (*DEEP, "--strategy", "lens"),
    "identity": (*DEEP, "--strategy", "identity"),
    "quick": ("--prefill-exits",),
}


@dataclass(frozen=True)
class Part:
    """A process that measures something, and the files it reads."""

    name: str
    words: list[str]
    needs: tuple[str, ...] = ()
    result: str | None = None  # a file below OUT that it writes itself; None: the last line it prints


def parts(of: str, data: Path, out: Path, rows: int = 1) -> list[Part]:
    """Return the parts of a set; questions of `tide eval` are asked `rows` at a time."""
    prompts = str(data / PROMPTS)
    if of == "cpu":
        lines = len((data / PROMPTS).read_text("utf-8").splitlines()) if (data / PROMPTS).is_file() else CHOSEN
        every = str(max(1, lines // CHOSEN))
        return [
            Part("exact", ["bench_prompts.py", "--prompts", prompts, "--every", every], (PROMPTS,)),
            Part("exits-off", ["bench_decode.py", "--rounds", "3"]),
        ]
    half = ["--dtype", "bfloat16"]
    if of == "gpu":
        return _on_a_gpu(data, out, prompts, half)
    router = str(out / "certified.safetensors")
    found = [Part("certificate", [*TIDE, "certify", "default", "--prompts", prompts, "-o", router, "--json"], (PROMPTS,))]
    for task, size in SIZES.items():
        words = [*TIDE, "eval", "default", "--router", router, "--data", str(data), "--tasks", task]
        words += [] if rows == 1 else ["--batch-size", str(rows)]
        words += [] if size is None else ["--limit", str(size)]
        words += ["--execute-code"] if task == "humaneval" else []
        words += ["-o", str(out / f"eval-{task}.json")]
        needs = (ASKED[task] + (".txt" if task == "wikitext" else ".jsonl"),)
        found.append(Part(f"eval-{task}", words, needs, f"eval-{task}.json"))
    return found


def _on_a_gpu(data: Path, out: Path, prompts: str, half: list[str]) -> list[Part]:
    """Return the parts of a GPU, each of a minute or two; those of calibration as long as their names say."""
    rows, ours = ["--rows", "1", "8", "32", "64"], ["--without", "generate", "compiled", "continuous", "fast"]
    asked = ["--sets", "4", "--prompt-tokens", "200", "--new-tokens", "128", "--rounds", "5", "--warm-up", "3"]
    spec, shape = ["--prompts", prompts], ["--model", "llama-8b"]
    lengths = [word for tokens in (128, 512, 1024, 2048, 8192, 32768) for word in ("--tokens", str(tokens))]
    curve = ["--work", str(out), "--out", str(out), "--figure", str(out / "curve.png")]
    curve += [word for name in CURVE for word in ("--router", f"{name}={out / name}.safetensors")]
    return [
        Part("first-token-8b", ["bench_prefill.py", *shape, *lengths]),
        Part("settled-8b", ["bench_prefill.py", *shape, "--tokens", "2048", "--settle", "0.3", "--rounds", "20"]),
        Part("trees-gpu", ["bench_trees.py", *spec, "--every", "8", *half], (PROMPTS,)),
        Part("trees-8b", ["bench_trees.py", *spec, "--every", "40", *half, *shape], (PROMPTS,)),
        Part(
            "batch-gpu",
            ["bench_batch.py", *half, *spec, *rows, *ours, *asked],
            (PROMPTS,),
        ),
        Part("batch-8b", ["bench_batch.py", *shape, *rows, "--rounds", "2"]),
        Part("replay-rows-8b", ["bench_trees.py", *spec, "--every", "8", *half, *shape, "--rows", "8", "32"], (PROMPTS,)),
        Part("worker-gpu", ["bench_worker.py", *spec, "--rounds", "2"], (PROMPTS,)),
        Part(
            "exact-gpu", ["bench_prompts.py", *spec, "--every", "3", "--generate-every", "12", "--warm-up", *half], (PROMPTS,)
        ),
        Part("exits-off-8b", ["bench_decode.py", *shape, "--rounds", "3"]),
        Part("exits-off-gpu", ["bench_decode.py", *half, "--rounds", "5"]),
        Part("first-token-gpu", ["bench_prefill.py", *half]),
        Part("warm-up-8b", ["bench_warm_up.py", *shape]),
        Part("warm-up-gpu", ["bench_warm_up.py"]),
        Part("rivals-gpu", [*TIDE, "bench", "--contender", "all", "--max-new-tokens", "128", "--json"]),
        *(_of_the_curve(name, how, out) for name, how in CURVE.items()),
        Part("curve-gpu", ["curve.py", "--data", str(data), *half, *curve], (PROMPTS,), "curve.json"),
        *(part for minutes in (1, 3, 10, 30) for part in _calibrated(minutes, out, prompts, half)),
        *(Part(f"calibrate-{name}", ["bench_calibrate.py", "--model", name]) for name in ("qwen2-1.5b", "llama-8b")),
        Part("heads", ["compare_heads.py", *spec, "--keep", str(out), "--texts", "4000", "--every", "4"], (PROMPTS,)),
    ]


def _of_the_curve(name: str, how: tuple[str, ...], out: Path) -> Part:
    """Return the part that calibrates exits of the curve."""
    words = [*TIDE, "calibrate", "default", "--quick", "--minutes", "15", *how, "-o", f"{out / name}.safetensors", "--json"]
    return Part(f"calibrate-{name}", words)


def _calibrated(minutes: int, out: Path, prompts: str, half: list[str]) -> list[Part]:
    """Return the parts that calibrate the embedded model in so many minutes, and ask the exits about Spec-Bench."""
    router = str(out / f"minutes-{minutes}.safetensors")
    calibrate = [*TIDE, "calibrate", "default", "--minutes", str(minutes), "-o", router, "--json", *half]
    asked = ["--router", router, "--prompts", prompts, *half]
    return [
        Part(f"calibrate-{minutes}-min", calibrate),
        Part(f"agreement-{minutes}-min", ["eval_exits.py", *asked], (PROMPTS,)),
        Part(
            f"exact-{minutes}-min",
            ["bench_prompts.py", *asked, "--every", "8", "--generate-every", "240", "--warm-up"],
            (PROMPTS,),
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=["cpu", "gpu", "quality"])
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--part", action="append", default=[], help="only this part; may be repeated")
    parser.add_argument("--again", action="append", default=[], metavar="PART", help="run a part again that is there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further part after so many")
    parser.add_argument("--rows", type=int, default=1, help="questions of tide eval that are asked together; more for a GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = parts(options.set, options.data, options.out, options.rows)
    names = [part.name for part in wanted]
    if unknown := sorted({*options.part, *options.again} - {*names}):
        parser.error(f"expected parts of {options.set}: {', '.join(names)}; found {', '.join(unknown)}.")
    check_settings(options.out, options.data, wanted)
    began, missing = time.monotonic(), {}
    for part in wanted:
        if options.part and part.name not in options.part:
            continue
        path = options.out / f"{part.name}.done.json"
        if path.exists() and part.name not in options.again:
            print(f"{part.name}: there already ({path})", flush=True)
            if (held := json.loads(path.read_text("utf-8"))["words"]) != part.words:
                missing[part.name] = f"{path} is of {' '.join(held)}. Add --again {part.name}, or give another --out"
        elif time.monotonic() - began > 60 * options.minutes:
            missing[part.name] = f"{options.minutes:g} minutes are over. The same command goes on"
        elif why := measured(part, options.data, options.out, path):
            missing[part.name] = why
    comparison = compared(options.out) if options.set == "cpu" else Comparison([], [])
    for line in comparison.lines:
        print(line)
    for name, why in missing.items():
        print(f"{name}: not measured: {why}.")
    for title in comparison.failed:
        print(f"not as in the README: {title}.")
    return bool(missing or comparison.failed)


def check_settings(out: Path, data: Path, wanted: list[Part]) -> None:
    """Note what all parts of OUT depend on, or end where those that are there were measured with something else."""
    from kept import identity
    from TIDE.evals.machine import circumstances

    facts = circumstances()
    sources = [one for folder in (HERE.parent / "src", HERE) for one in sorted(folder.rglob("*.py"))]
    settings = {
        "commit": facts["commit"],
        "code": identity([identity(one) for one in sources]),
        "machine": {name: facts["hardware"][name] for name in ("cpu", "cores", "threads", "gpus")},
        "data": {name: identity(data / name) for part in wanted for name in part.needs if (data / name).is_file()},
    }
    path = out / "settings.json"
    held = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not held and not any(out.glob("*.done.json")):
        held = settings
    files = held.get("data", {})
    different = [name for name in ("code", "machine") if held.get(name) != settings[name]]
    different += [name for name, own in settings["data"].items() if files.get(name, own) != own]
    if different:
        said = f"expected {', '.join(different)} as now (commit {settings['commit']}), found others ({held.get('commit')})"
        raise SystemExit(f"{out} has parts that were measured with something else: {said}. Give another --out.")
    path.write_text(json.dumps(held | {"data": files | settings["data"]}, indent=1), "utf-8")


def measured(part: Part, data: Path, out: Path, path: Path) -> str | None:
    """Run a part and keep its result; return why there is none."""
    if absent := [name for name in part.needs if not (data / name).is_file()]:
        return f"there is no {', '.join(str(data / name) for name in absent)}"
    words = [str(HERE / part.words[0]), *part.words[1:]] if part.words[0].endswith(".py") else part.words
    print(f"{part.name}: {' '.join(part.words)}", flush=True)
    began = time.monotonic()
    said: list[str] = []
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        listener = threading.Thread(target=_passed_on, args=(process.stderr, said))
        listener.start()
        lines = []
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line)
        listener.join()
    (out / f"{part.name}.txt").write_text("".join(lines), "utf-8")
    if process.returncode:
        return f"it ended with code {process.returncode}; its output is in {out / part.name}.txt"
    if uncompiled := [line.strip() for line in said if WITHOUT_LAYERS in line]:
        return f"it ran on the model's own modules ({uncompiled[0]})"
    found = result_of(part, lines, out)
    if found is None:
        return f"it printed no JSON; its output is in {out / part.name}.txt"
    keep(path, {"part": part.name, "minutes": round((time.monotonic() - began) / 60, 2), "words": part.words, "result": found})
    return None


def _passed_on(stream: IO[str], said: list[str]) -> None:
    """Pass on and keep what a process says beside its results."""
    for line in stream:
        print(line, end="", file=sys.stderr, flush=True)
        said.append(line)


def result_of(part: Part, lines: list[str], out: Path) -> Any:
    """Return what a part has measured: the file it writes, its last line, or all that it printed."""
    texts = [(out / part.result).read_text("utf-8")] if part.result is not None else [*lines[-1:], "".join(lines)]
    for text in texts:
        try:
            return json.loads(text)
        except ValueError:
            continue
    return None


def keep(path: Path, found: dict[str, Any]) -> None:
    from TIDE.evals.machine import circumstances
    from TIDE.routing.storage import write_atomically

    write_atomically(path, json.dumps(circumstances() | found, indent=1).encode())


class Comparison(NamedTuple):
    """A table for the terminal, and the titles of the lines that do not hold."""

    lines: list[str]
    failed: list[str]

    def add(self, title: str, line: str, holds: bool) -> None:
        self.lines.append(f"{line}   {'yes' if holds else 'NO'}")
        self.failed.extend([] if holds else [title])

    def ratio(self, title: str, readme: float, found: float) -> None:
        self.add(title, f"{title:34}{readme:9.2f}{found:9.2f}", abs(found / readme - 1) <= SPREAD)


def compared(out: Path) -> Comparison:
    """Return the CPU's ratios beside those of the README, and which are not within the spread."""
    docs = HERE.parent / "docs" / "results"
    comparison = Comparison([f"{'':34}{'README':>9}{'here':>9}   within {SPREAD:.0%}"], [])
    if (path := out / "exact.done.json").exists():
        found, readme = json.loads(path.read_text("utf-8"))["result"], json.loads((docs / "exact-arm.json").read_text("utf-8"))
        for title, key in (
            ("off / generate", "off/generate"),
            ("exact / off", "exact/off"),
            ("exact / generate", "exact/generate"),
        ):
            comparison.ratio(f"Spec-Bench, {title}", readme["table"]["all"][title], found["tok/s"]["all"][key])
        same = found["exact_is_exits_off"] == found["prompts"] and found["all_the_same"] == found["with_generate"]
        off, generate = (
            f"{found['exact_is_exits_off']} of {found['prompts']}",
            f"{found['all_the_same']} of {found['with_generate']}",
        )
        comparison.add("texts", f"texts: {off} are those of exits off, {generate} those of model.generate", same)
    if (path := out / "exits-off.done.json").exists():
        found = json.loads(path.read_text("utf-8"))["result"]["results"]["TIDE, exits off"]["ratio"]
        (readme,) = json.loads((docs / "exits-off-arm.json").read_text("utf-8"))["table"].values()
        comparison.ratio("random prompt, off / generate", readme["× model.generate"], found)
    return comparison


if __name__ == "__main__":
    sys.exit(main())
