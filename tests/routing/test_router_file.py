"""Router files: what is saved comes back, whole or with an error that says what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from families import build
from router_files import SIZES, made, tensors_of
from TIDE import TIDE
from TIDE.adapters.adapter import ModelAdapter
from TIDE.models.default import default_router
from TIDE.prompt_exits.maps import FittedPromptExit
from TIDE.routing import storage
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.certificate import Certificate, Settings
from TIDE.routing.policies import policy_for
from TIDE.routing.router import Router
from TIDE.routing.router_file import RouterFile

SUFFIXES = ["safetensors", "pt"]
STRATEGIES = ["identity", "lens", "memory"]  # whose exits may stand at several depths


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_file_is_loaded_with_the_same_content(tmp_path, strategy, suffix, dtype):
    file, path = made(strategy, dtype=dtype), tmp_path / "new folder" / f"router.{suffix}"
    file.save(path)
    again = RouterFile.load(path)
    assert again.as_dict() == file.as_dict()
    assert again.checkpoints == (0, 2)
    assert again.fingerprint == file.fingerprint
    expected, found = tensors_of(file), tensors_of(again)
    assert list(found) == list(expected)
    assert all(found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected)
    for depth, at in again.exits.items():
        assert type(at.head) is type(file.exits[depth].head)
        assert at.sizes == SIZES[strategy]
        assert not any(parameter.requires_grad for parameter in (*at.head.parameters(), *at.router.parameters()))
        states, logits = torch.randn(3, 64), torch.randn(3, 100)
        assert torch.equal(at.router(states, logits), file.exits[depth].router(states, logits))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_content_gives_the_same_bytes(tmp_path, suffix):
    first, second, third = (tmp_path / f"{name}.{suffix}" for name in ("one", "another", "third"))
    made().save(first)
    made().save(second)
    RouterFile.load(first).save(third)
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("strategy", ["lens", "memory"])
def test_a_compressed_file_is_smaller_and_nearly_the_same(tmp_path, strategy, suffix):
    file = made(strategy)
    file.exits[0].head.down.weight.data[0] = 0
    plain, small = tmp_path / f"plain.{suffix}", tmp_path / f"small.{suffix}"
    file.save(plain)
    file.save(small, compress=True)
    assert small.stat().st_size < 0.5 * plain.stat().st_size
    expected, found = tensors_of(file), tensors_of(RouterFile.load(small))
    assert list(found) == list(expected)
    for name, weight in expected.items():
        if ".head." in name and weight.ndim == 2:
            assert found[name].dtype == torch.bfloat16
            largest = weight.abs().amax(1, keepdim=True)
            assert ((found[name] - weight).abs() <= largest * (0.5 / 127 + 2**-8)).all()
        else:
            assert torch.equal(found[name], weight)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, moment, interruption):
    path = tmp_path / "router.safetensors"
    made("lens").save(path)
    before = path.read_bytes()

    def fail(*_):
        raise interruption

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(type(interruption)):
        made("memory").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_saved_file_can_be_read_by_whoever_may_read_the_folders_files(tmp_path):
    made("identity").save(tmp_path / "router.pt")
    (tmp_path / "other").touch()
    assert (tmp_path / "router.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_figures_that_were_not_measured_are_null_and_those_of_torch_are_numbers(tmp_path):
    file = made("identity")
    file.figures = {"auroc": float("nan"), "rate": torch.tensor(0.5), "depths": (1, 2)}
    file.save(tmp_path / "router.pt")
    assert RouterFile.load(tmp_path / "router.pt").figures == {"auroc": None, "rate": 0.5, "depths": [1, 2]}
    file.figures = {"model": torch.nn.Linear(1, 1)}
    with pytest.raises(ValueError, match="holds plain values .*, found Linear"):
        file.save(tmp_path / "router.pt")


def spoil_weight(file: RouterFile) -> None:
    file.exits[1].head.qkv.weight.data[0, 0] = float("inf")


def spoil_temperature(value: float, dtype: torch.dtype = torch.float32):
    def spoil(file: RouterFile) -> None:
        file.exits[2].router.temperature = torch.tensor(value, dtype=dtype)

    return spoil


SPOILT = {
    "weights": (spoil_weight, "at depth 1, head.qkv.weight holds weights that are not finite numbers"),
    "temperature": (spoil_temperature(0), "at depth 2, router.temperature holds numbers that are not above 0"),
    "negative temperature": (spoil_temperature(-1), "at depth 2, router.temperature holds numbers that are not above 0"),
    "tiny temperature": (spoil_temperature(1e-300, torch.float64), "router.temperature holds numbers that are not above 0"),
    "spread": (lambda file: file.exits[0].head.deep_spread[3:4].zero_(), "head.deep_spread holds numbers that are not above 0"),
    "checkpoints": (lambda file: setattr(file, "checkpoints", (0, 7)), r"checkpoints among the exits \[0, 1, 2, 3\].*\[0, 7\]"),
    "order": (lambda file: setattr(file, "checkpoints", (2, 0)), r"rising, found \[2, 0\]"),
    "depths": (lambda file: setattr(file, "exits", {2: file.exits[2], 0: file.exits[0]}), "exits at rising depths"),
    "empty": (lambda file: setattr(file, "exits", {}), "it holds no routers"),
    "strategy": (lambda file: setattr(file, "strategy", "magic"), "expected a strategy of .*, found 'magic'"),
    "head": (lambda file: setattr(file, "strategy", "lens"), "expected a head of strategy 'lens', found MemoryHead"),
    "pending": (lambda file: setattr(file, "max_pending", 0), "max_pending of at least 1, found 0"),
    "threshold": (lambda file: setattr(file.exits[0], "threshold", float("nan")), "expected a number as threshold, found nan"),
    "figures": (lambda file: setattr(file.exits[0], "figures", [1]), "names and values as figures, found list"),
    "facts": (lambda file: setattr(file, "facts", None), "names and values as config, facts and figures"),
    "tokens": (lambda file: setattr(file, "vocabulary", torch.tensor([5, 200])), "token ids that do not exist or come twice"),
    "twice": (lambda file: setattr(file, "vocabulary", torch.tensor([5, 5])), "token ids that do not exist or come twice"),
    "words": (lambda file: setattr(file, "vocabulary", torch.ones(3)), "a list of token ids as vocabulary"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_useless_file_is_not_saved(tmp_path, name):
    spoil, complaint = SPOILT[name]
    file = made()
    spoil(file)
    with pytest.raises(ValueError, match=f"was not saved: .*{complaint}"):
        file.save(tmp_path / "router.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(set(SPOILT) - {"threshold", "depths"}))  # these two cannot be written
def test_a_useless_file_is_not_loaded(tmp_path, monkeypatch, name):
    file, path = made(), tmp_path / "router.safetensors"
    SPOILT[name][0](file)
    with monkeypatch.context() as careless:
        careless.setattr("TIDE.routing.router_file.wrong_with", lambda file: None)
        file.save(path)
    with pytest.raises(ValueError, match="router.safetensors is damaged: "):
        RouterFile.load(path)


def test_exits_in_the_prompt_whose_temperature_is_0_are_useless():
    exit_ = FittedPromptExit(1, Router(64, 8, 1), {})
    assert exit_.wrong() is None
    exit_.router.temperature.zero_()
    assert exit_.wrong() == "settling.router.temperature is not above 0"


class Hostile:
    def __reduce__(self):
        return print, ("code was run",)


def edited(change=None, tensors=None) -> storage.Stored:
    """What a good file holds, with changes to its document and its tensors."""
    file = made("lens")
    document = json.loads(json.dumps(file.as_dict()))
    if change:
        change(document)
    found = dict(tensors_of(file), vocabulary=file.vocabulary.int()) | (tensors or {})
    return storage.Stored(json.dumps(document), {name: tensor for name, tensor in found.items() if tensor is not None})


def certificate(threshold) -> dict:
    return Certificate(threshold, 0.05, 0.95, "rouge_l", 100, 64, Settings("exact", 0, 5, 0.9, "float32")).as_dict()


DAMAGED = {
    "unknown format": (
        lambda d: d.update(format=9),
        {},
        "has format 9, this version of TIDE reads formats 1 to 2. Install a newer one",
    ),
    "no format": (lambda d: d.pop("format"), {}, "is damaged: it lacks 'format'"),
    "no strategy": (lambda d: d.pop("strategy"), {}, "is damaged: it lacks 'strategy'"),
    "a checkpoint that is no whole number": (
        lambda d: d.update(checkpoints=[float(depth) for depth in d["checkpoints"]]),
        {},
        r"expected checkpoints among the exits",
    ),
    "other strategy": (lambda d: d.update(strategy="magic"), {}, "expected a strategy of"),
    "exits of another kind": (lambda d: d.update(exits=7), {}, "is damaged"),
    "a depth that is a word": (lambda d: d["exits"].update(x=d["exits"].pop("0")), {}, "is damaged"),
    "a size too many": (lambda d: d["exits"]["0"]["sizes"].update(width=3), {}, "is damaged"),
    "another size": (
        lambda d: d["exits"]["0"]["sizes"].update(inner_dim=47),
        {},
        "expected exits.0.head.down.weight with",
    ),
    "a huge size": (lambda d: d["exits"]["0"]["sizes"].update(inner_dim=10**12), {}, "is damaged"),
    "a size beyond all": (lambda d: d["exits"]["0"]["sizes"].update(hidden_dim=10**40), {}, "is damaged"),
    "a size that is a word": (lambda d: d["exits"]["0"]["router"].update(bottleneck_dim="8"), {}, "is damaged"),
    "not a number": (lambda d: d["exits"]["0"].update(threshold=float("nan")), {}, "it holds the number NaN"),
    "another fingerprint": (lambda d: d["fingerprint"].update(colour="blue"), {}, "is damaged"),
    "a certificate of another kind": (lambda d: d.update(certificate={"threshold": 0.5}), {}, "is damaged"),
    "a certificate beyond all": (lambda d: d.update(certificate=certificate(7)), {}, "a threshold from 0 to 1, found 7"),
    "another vocabulary": (lambda d: d.update(vocabulary=99), {}, "expected a vocabulary of 99 tokens"),
    "no vocabulary": (None, {"vocabulary": None}, "expected a vocabulary of 100 tokens"),
    "a tensor too few": (None, {"exits.2.router.offset": None}, r"expected exits.2.router.offset with .*, found nothing"),
    "a tensor too many": (None, {"exits.9.head.down.weight": torch.ones(2)}, "belong to no exit: .'exits.9.head.down.weight'"),
    "a tensor of another kind": (None, {"exits.0.head.up.weight": torch.ones(64, 48, dtype=torch.int64)}, "found torch.int64"),
    "a scale without its matrix": (None, {"exits.0.head.x.scale": torch.ones(2)}, "is damaged"),
    "a scale of another length": (None, {"exits.0.head.up.weight.scale": torch.ones(2)}, "does not fit exits.0.head.up.weight"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_document_is_an_error_that_says_what_is_wrong(tmp_path, name, suffix):
    change, tensors, complaint = DAMAGED[name]
    path = tmp_path / f"router.{suffix}"
    storage.write(path, edited())
    RouterFile.load(path)
    storage.write(path, edited(change, tensors))
    with pytest.raises(ValueError, match=complaint) as caught:
        RouterFile.load(path)
    assert str(path) in str(caught.value)


def test_files_from_before_there_were_certificates_load_without_one(tmp_path):
    path = tmp_path / "router.safetensors"
    storage.write(path, edited(lambda d: d.pop("certificate")))
    assert RouterFile.load(path).certificate is None


def test_files_of_other_kinds_are_refused_and_nothing_of_them_runs(tmp_path, capsys):
    made("lens").save(tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "renamed.pt").write_bytes(whole)
    save_file({"weights": torch.ones(2)}, tmp_path / "other.safetensors", {"format": "pt"})
    torch.save({"tide": "{}", "tensors": Hostile()}, tmp_path / "hostile.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"tide": "{}", "tensors": Hostile()}))
    torch.save({"tide": Ellipsis, "tensors": {}}, tmp_path / "dots.pt")
    torch.save({"tide": 7, "tensors": {}}, tmp_path / "number.pt")
    torch.save({"tide": edited().document, "tensors": 7}, tmp_path / "kind.pt")
    wide = edited(lambda d: d.update(format=1), {"exits.0.head.down.weight": torch.ones(1, 1).expand(48, 64)})
    torch.save({"tide": wide.document, "tensors": wide.tensors}, tmp_path / "wide.pt")
    for name, complaint in {
        "truncated.safetensors": "was not loaded: it is truncated",
        "empty.safetensors": "was not loaded",
        "renamed.pt": "was not loaded",
        "other.safetensors": r"is not a router file: .* found \['format'\]",
        "hostile.pt": "holds more than tensors and plain values",
        "pickle.pt": "holds more than tensors and plain values",
        "dots.pt": "was not loaded|is damaged",
        "number.pt": "is damaged",
        "kind.pt": "was not loaded: expected tensors by name, found int",
        "wide.pt": "was not loaded: .* a number of their own in the file",
    }.items():
        with pytest.raises(ValueError, match=complaint):
            RouterFile.load(tmp_path / name)
    assert "code was run" not in capsys.readouterr().out


HUGE = 1 << 30  # as both sides of a matrix: more memory than any machine has
SHARED = torch.zeros(1000, 1000)
WITHOUT_NUMBERS = {
    "one number": {0: torch.zeros(1).expand(HUGE, HUGE)},
    "rows again": {0: torch.zeros(8, 4).expand(1000, 8, 4)},
    "meta": {0: torch.empty(HUGE, HUGE, device="meta")},
    "one tensor again": {depth: SHARED.view(1000, 1000) for depth in range(1000)},
}


@pytest.mark.parametrize("name", WITHOUT_NUMBERS)
def test_a_small_file_of_huge_tensors_is_refused_before_memory_is_taken(tmp_path, name):
    huge = {f"exits.{depth}.head.down.weight": tensor for depth, tensor in WITHOUT_NUMBERS[name].items()}
    tensors = dict(edited().tensors, sha256=edited().digest()) | huge
    torch.save({"tide": edited().document, "tensors": tensors}, tmp_path / "wide.pt")
    with pytest.raises(ValueError, match="wide.pt was not loaded: .* a number of their own in the file"):
        RouterFile.load(tmp_path / "wide.pt")


def deflated(path: Path) -> Path:
    """The same archive, compressed."""
    small = path.with_name("small.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return small


def test_a_compressed_archive_is_not_inflated(tmp_path):
    path = tmp_path / "router.pt"
    storage.write(path, edited(tensors={"exits.0.head.down.weight": torch.zeros(1000, 1000)}))
    with pytest.raises(ValueError, match=r"small.pt was not loaded: expected at most .* bytes, found \d+ compressed"):
        RouterFile.load(deflated(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_of_thousands_of_empty_tensors_is_refused_by_their_number(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(storage.Stored, "digest", lambda stored: pytest.fail("their numbers were read"))
    path, tensors = tmp_path / f"many.{suffix}", {f"exits.{depth}.x": torch.zeros(0) for depth in range(10_001)}
    if suffix == "pt":
        torch.save({"tide": edited().document, "tensors": tensors | {"sha256": torch.zeros(32)}}, path)
    else:
        save_file(tensors | {"sha256": torch.zeros(32)}, path, {"tide": edited().document})
    with pytest.raises(ValueError, match=f"many.{suffix} was not loaded: expected at most 10000 tensors, found 10002"):
        RouterFile.load(path)


LONG = "\x1b[2J" + 10_000 * "x\n"
SHOWN = {
    "strategy": lambda d: d.update(strategy=LONG),
    "format": lambda d: d.update(format=LONG),
    "field": lambda d: d["fingerprint"].update({LONG: 1}),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", [*SHOWN, "tensor", "no router file"])
def test_an_error_repeats_little_of_a_file_on_one_line(tmp_path, name, suffix):
    path = tmp_path / f"router.{suffix}"
    storage.write(path, edited(SHOWN.get(name), {f"exits.{LONG}": torch.ones(2)} if name == "tensor" else None))
    if name == "no router file" and suffix == "pt":
        torch.save({f"{LONG}{number}": 1 for number in range(1000)}, path)
    elif name == "no router file":
        save_file({"weights": torch.ones(2)}, path, {LONG: "pt"})
    with pytest.raises(ValueError, match="router.* (has format|is damaged|is not a router file)") as caught:
        RouterFile.load(path)
    assert len(str(caught.value)) < 700 + len(str(path)) and str(caught.value).isprintable()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_changed_byte_is_refused_or_changes_no_content(tmp_path, suffix):
    path = tmp_path / f"damaged.{suffix}"
    made("identity").save(path)
    whole, choose = path.read_bytes(), random.Random(0)
    expected, complaints = storage.read(path), []
    for _ in range(200):
        content = bytearray(whole)
        place = choose.randrange(len(content))
        content[place] ^= choose.randrange(1, 256)
        path.write_bytes(content)
        try:
            RouterFile.load(path)
        except ValueError as problem:
            complaints.append(str(problem))
            continue
        found = storage.read(path)  # what holds the archive together may change without harm
        assert found.document == expected.document
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert len(complaints) > 100
    assert all(path.name in complaint for complaint in complaints)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_changed_weight_is_refused_by_the_checksum(tmp_path, suffix):
    path = tmp_path / f"router.{suffix}"
    storage.write(path, edited())
    changed = edited(tensors={"exits.0.router.offset": torch.tensor(0.25)})
    tensors = dict(changed.tensors, sha256=edited().digest())
    if suffix == "pt":
        torch.save({"tide": changed.document, "tensors": tensors}, path)
    else:
        save_file(tensors, path, {"tide": changed.document})
    with pytest.raises(ValueError, match="its content was changed since it was saved .the checksum does not fit."):
        RouterFile.load(path)


def test_a_file_whose_checksum_was_lost_is_refused(tmp_path):
    path = tmp_path / "router.safetensors"
    save_file(edited().tensors, path, {"tide": edited().document})
    with pytest.raises(ValueError, match="is damaged: its checksum is missing"):
        RouterFile.load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_0_3_0_load_and_get_a_checksum_when_saved(tmp_path, suffix):
    source = Path(__file__).parent / "data" / f"of-0.3.0.{suffix}"
    held = RouterFile.load(source)
    assert held.version == "0.3.0"
    assert storage.read(source).checksum is None
    expected = tensors_of(made("identity"))  # random numbers of another processor, which differ in the last digit
    assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in tensors_of(held).items())
    held.save(tmp_path / f"router.{suffix}")
    assert storage.read(tmp_path / f"router.{suffix}").checksum is not None


def test_the_shipped_file_has_a_checksum():
    assert storage.read(default_router()).checksum is not None


def test_a_file_that_is_not_there_or_ends_otherwise_is_named(llama, tmp_path):
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no router file"):
            TIDE(llama, path)
    (tmp_path / "router.bin").touch()
    with pytest.raises(ValueError, match="a router file ends in .safetensors or .pt, found 'router.bin'"):
        TIDE(llama, tmp_path / "router.bin")
    with pytest.raises(ValueError, match="a router file ends in .safetensors or .pt, found 'router.bin'"):
        made("identity").save(tmp_path / "router.bin")


@pytest.fixture
def adapter(llama):
    adapter = ModelAdapter(llama)
    yield adapter
    adapter.close()


def test_its_own_model_gets_the_calibrated_policy(adapter):
    file = made("identity", adapter.model)
    for dtype in (torch.float32, torch.bfloat16):
        adapter.model.to(dtype)
        policy = policy_for(file, adapter)
        assert isinstance(policy, CalibratedPolicy)
        assert policy.checkpoints == file.checkpoints
        assert policy.exit_thresholds == {depth: file.exits[depth].threshold for depth in file.checkpoints}


def test_another_model_is_refused_with_both_named(tmp_path, llama):
    other = build("qwen2", num_hidden_layers=6)
    other.config._name_or_path, llama.config._name_or_path = "someone/Other-1B", "Ours-2B"
    path = tmp_path / "router.safetensors"
    made("identity", other).save(path)
    complaint = r"router.safetensors was made for someone/Other-1B \(Qwen2ForCausalLM, 6 layers .*; this model is Ours-2B "
    complaint += r"\(LlamaForCausalLM, 4 layers .* differ in architecture, num_layers, weights\. .*tide calibrate"
    with pytest.raises(ValueError, match=complaint):
        TIDE(llama, path)
    TIDE(llama).close()


def test_without_a_fingerprint_sizes_have_to_do(adapter):
    file = made("identity")
    file.fingerprint, file.exits[4] = None, file.exits[3]
    with pytest.raises(ValueError, match=r"exits at depths \[0, 1, 2, 3, 4\]; this model has states of 64 and 4 layers"):
        policy_for(file, adapter)
