"""Loading a model with its tokenizer: the embedded default, a hub id, or a local path (a folder or a GGUF file)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from TIDE.hub import EXPECTED, broken_answer, model_source


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(
    name: str | Path = "default",
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a causal LM in eval mode and its tokenizer, set to pad on the left.

    Args:
        name: "default" (SmolLM2-135M-Instruct, fetched once), a hub id, a folder, or a .gguf file.
        dtype: None: fp32 on a CPU and for GGUF files, otherwise the dtype of the stored weights.
        device: None: the GPU if there is one.
        trust_remote_code: run code that comes with the model.
    """
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted: Any = dtype or (torch.float32 if place.type == "cpu" else "auto")
    model, tokenizer = _read(str(name), wanted, trust_remote_code)
    tokenizer.padding_side = "left"
    return Loaded(model.to(place).eval(), tokenizer)


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> Loaded:
    """Read a GGUF file, dequantized; its name and sizes go to stderr."""
    check_gguf(path.name)
    from transformers import GgufConfig

    from TIDE.models.gguf_reader import parsed_once, sizes

    config = GgufConfig(dequantize=True)
    with parsed_once():
        stored, weights = sizes(path)
        unpacked = f"{weights * dtype.itemsize / 1e6:,.0f} MB unpacked to {str(dtype).removeprefix('torch.')}"
        print(f"reading {path.name}: a file of {stored / 1e6:,.0f} MB, {unpacked}", file=sys.stderr)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype, quantization_config=config)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model.config._name_or_path = path.name  # its folder's name says nothing of the model
    # dequantized: an ordinary model from here on
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return Loaded(model, tokenizer)


def check_gguf(name: str) -> None:
    """Raise if a package that reads GGUF files is not installed."""
    if missing := [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]:
        raise ImportError(f"reading {name} needs {' and '.join(missing)}. Install with: pip install {' '.join(missing)}")


def _read(name: str, dtype: Any, trust_remote_code: bool = False) -> Loaded:
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise FileNotFoundError(
                f"there is no file {name}. Give the path of a .gguf file, a model folder, a hub id, or 'default'."
            )
        return read_gguf(Path(name), torch.float32 if dtype == "auto" else dtype)
    if name == "default":
        from TIDE.models.default import default_model_path

        name = str(default_model_path())
    source = model_source(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code)
        return Loaded(model, AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code))
    except OSError as problem:
        raise OSError(f"cannot load {name!r}: {EXPECTED}. ({problem})") from problem
    except Exception as problem:  # the type depends on the HTTP library in use
        if Path(source).is_dir() or (why := broken_answer(problem)) is None:
            raise
        raise OSError(f"cannot load {name!r}: {why}. Try again, or give a folder with a model.") from problem
