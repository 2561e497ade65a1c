"""Wrong usage is one line that says what to do, before any work: no model is loaded, and nothing is written."""

from __future__ import annotations

import importlib.util
import shlex

import pytest

import TIDE
from commands import COMMANDS, tide
from eval_data import data_folder

ASK = "generate hello --model MODEL"
CERTIFY = "certify MODEL --router ROUTER --prompts PROMPTS"
TUNE = "tune MODEL --router ROUTER --prompts PROMPTS"
EVAL = "eval MODEL --router ROUTER --data QUESTIONS -o run.json"
A_MODEL = "Give a folder with a model"
# command line -> a part of what is said; the names in capitals are there
WRONG = {
    "demo --rounds 0": "'--rounds'",
    "demo --output missing/a.html": "there is no folder",
    "calibrate x --strategy guess": "'guess' is not one of 'identity', 'lens', 'memory', 'eagle3'",
    "calibrate default --samples 3": "calibration_samples must be a whole number of at least 20, found 3.",
    "calibrate default --dataset missing.txt": "there is no file missing.txt.",
    "calibrate default --dataset ' '": "calibration_dataset must be",
    "calibrate default --from nowhere.pt": "there is no router file nowhere.pt.",
    "calibrate default --dtype int8": "'int8' is not one of 'float32', 'bfloat16', 'float16'",
    "calibrate default -o router.bin": "expected a file that ends in .safetensors or .pt, found 'router.bin'.",
    "calibrate default -o nowhere/router.pt": "there is no folder nowhere to write router.pt to. Make it first.",
    "generate hi --mode exact --kv-cache-strategy zero_pad": "Use kv_cache_strategy='exact', or mode='fast'.",
    "generate ' ' --model MODEL": "expected prompts with words in them, found an empty one.",
    "generate hi --model MODEL --router ROUTER --no-exits": "--no-exits uses no router file. Leave out --router or --no-exits.",
    "generate hello again --model MODEL --save run.json": "--save keeps one run, found 2 prompts. Ask one at a time.",
    f"{ASK} --mode slow": "'slow' is not one of 'exact', 'fast'",
    f"{ASK} --max-exit-share 2": "max_exit_share must be a number from 0 to 1, found 2.0.",
    f"{ASK} --file PROMPTS": "expected prompts as arguments or --file, found both. Leave one out.",
    f"{ASK} --system 'Be brief.' --raw": "--system goes into the chat template, which --raw leaves out.",
    f"{ASK} --top-p 0": "top_p must be above 0 and at most 1, found 0.0.",
    f"{ASK} --seed {2**64}": "seed must be an integer of 64 bits, found 18446744073709551616.",
    f"{ASK} --stop ''": "stop must be texts that are not empty, found [''].",
    f"{ASK} --router nowhere.safetensors": "there is no router file nowhere.safetensors. Make one with tide calibrate",
    f"{ASK} --save run.txt": "expected a file that ends in .json, found 'run.txt'.",
    f"{ASK} --save nowhere/run.json": "there is no folder nowhere to write run.json to. Make it first.",
    "chat nowhere/model/here": f"there is no nowhere/model/here. {A_MODEL}",
    "tune default --prompts nowhere.jsonl": "'nowhere.jsonl' does not exist",
    f"{TUNE} --prompts missing.jsonl": "missing.jsonl",
    f"{TUNE} --strategy magic": "expected exact, propagate, zero_pad, found magic.",
    f"{TUNE} --figure out.xyz": "out.xyz",
    "certify x --prompts TEXTS": "expected a .jsonl file with a prompt a line",
    f"{CERTIFY} --risk 1": "risk must be a number between 0 and 1, found 1.0",
    f"{CERTIFY} --confidence 0": "confidence must be a number between 0 and 1, found 0.0",
    f"{CERTIFY} --loss bleu": "'bleu' is not one of 'rouge_l', 'mismatch'",
    f"{CERTIFY} --prompts missing.jsonl": "missing.jsonl",
    f"{CERTIFY} --router missing.safetensors": "there is no router file",
    f"{CERTIFY} -o out.txt": "ends in .safetensors or .pt",
    f"{CERTIFY} -o nowhere/out.pt": "there is no folder nowhere",
    f"{CERTIFY} --kv-cache-strategy magic": "'magic' is not one of",
    f"{CERTIFY}": "20 prompts are too few",
    f"{CERTIFY} --risk 0.2 --confidence 0.8 --limit 3": "3 prompts are too few",
    "analyze nothing.gguf": f"nothing.gguf. {A_MODEL}",
    "analyze MODEL --no-heads --dataset missing.txt": "there is no file missing.txt. Give a .txt or .jsonl file",
    "analyze MODEL --no-heads --dataset ' '": "calibration_dataset",
    "analyze MODEL --no-heads --figure missing/out.png": "missing",
    "analyze MODEL --no-heads --figure out.xyz": "out.xyz",
    "bench hi --model nobody/nothing": "give --router FILE, or make one: tide calibrate nobody/nothing",
    "bench hi --model MODEL": "or make one: tide calibrate MODEL. Or go without: --no-exits.",
    "bench hi --model MODEL --router ROUTER --no-exits": "--no-exits uses no router file.",
    "eval default --tasks gsm8k --data .": "there is no gsm8k/test.jsonl. Give --data the folder",
    f"{EVAL} --tasks humaneval": "Allow it with --execute-code",
    f"{EVAL} --tasks ' , '": "expected the name of a task, found none",
    f"{EVAL} --tasks gsm8k --mode slow": "expected off, exact, fast, found slow",
    f"{EVAL} --tasks gsm8k --mode exact --threshold 0.5": "Add --mode fast",
    f"{EVAL} --tasks gsm8k -o x.txt": "expected a file that ends in .json",
    "inspect nowhere.safetensors": "there is no router file nowhere.safetensors",
    "inspect a/b/c": "there is no router file a/b/c",
    "inspect 'no such'": "there is no router file no such",
    "export nowhere.safetensors --to new": "there is no router file nowhere.safetensors",
    "report": "Missing argument",
    "serve --port abc": "Invalid value for '--port'",
    "serve default --max-rows 65": "max_rows must be at most 64, the answers that an engine decodes together, found 65.",
    "serve default --cache-gib 0": "cache_gib must be a number of GiB above 0",
    "serve MODEL": "or make one: tide calibrate MODEL. Or go without: --no-exits.",
    "serve MODEL --router ROUTER --no-exits": "--no-exits uses no router file.",
}
for command in ("calibrate", "analyze", "certify --prompts PROMPTS", "tune --prompts PROMPTS", "chat"):
    WRONG[f"{command} one/model --model another/model"] = "found one/model and --model another/model. Leave one out."
    WRONG[f"{command} --model ''"] = f"there is no model without a name. {A_MODEL}"
    WRONG[f"{command} --model nowhere/to/be/found"] = f"there is no nowhere/to/be/found. {A_MODEL}"
    if command != "chat":
        WRONG[command] = f"expected a model, found none. {A_MODEL}, a .gguf file, a hub id"


@pytest.fixture(scope="module")
def names(folder, shared_router, tmp_path_factory):
    questions = data_folder(tmp_path_factory.mktemp("questions"))
    texts, prompts = folder / "texts.txt", folder / "prompts.jsonl"
    return dict(MODEL=folder, ROUTER=shared_router, PROMPTS=prompts, TEXTS=texts, QUESTIONS=questions)


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    def load(name, **_):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(TIDE, "load_model", load)


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_one_line_that_says_what_to_do(line, names, monkeypatch, tmp_path):
    if "--figure" in line:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # drawing may not be installed
    monkeypatch.chdir(tmp_path)
    words = [str(names.get(word, word)) for word in shlex.split(line)]
    done = tide(*words)
    assert done.exit_code == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert WRONG[line].replace("MODEL", str(names["MODEL"])) in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.endswith(f" See tide {words[0]} --help.\n")
    assert len(done.stderr.splitlines()) == 1


def test_every_command_has_a_case():
    assert {line.split()[0] for line in WRONG} == set(COMMANDS)


BAD_PROMPTS = {
    "{": "line 2 is not JSON",
    "[1]": "line 2 is no object",
    '{"text": "Hello."}': "line 2 asks nothing",
    '{"prompt": " "}': "line 2 asks nothing",
    '{"prompt": 3}': "line 2 asks nothing",
    '{"turns": []}': "line 2 asks nothing",
}


@pytest.mark.parametrize("line", BAD_PROMPTS)
def test_a_bad_prompt_is_named_before_the_model_is_loaded(line, names, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f'{{"prompt": "Hello."}}\n{line}\n')
    for command in ("certify", "tune"):
        done = tide(command, names["MODEL"], "--router", names["ROUTER"], "--prompts", bad)
        assert done.exit_code == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
        assert f"bad.jsonl, {BAD_PROMPTS[line]}" in done.stderr
