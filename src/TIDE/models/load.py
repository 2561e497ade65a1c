"""Loading a model with its tokenizer: the embedded default, a hub id, or a local path (a folder or a GGUF file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from TIDE.hub import EXPECTED, GIVE, broken_answer, check_model, model_source
from TIDE.models.default import default_model_path
from TIDE.models.gguf import Loaded, read_gguf

SNAPSHOT_OPTIONS = {"revision", "cache_dir", "local_files_only"}  # that tell where an earlier download is
HUB_OPTIONS = SNAPSHOT_OPTIONS | {"token", "force_download", "subfolder"}  # of a model and of its tokenizer
REFUSED = {"gguf_file", "output_loading_info"}


def load_model(
    name: str | Path = "default",
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Loaded:
    """Load a causal LM in eval mode and its tokenizer, set to pad on the left.

    Args:
        name: "default" (SmolLM2-135M-Instruct, fetched once), a hub id, a folder, or a .gguf file.
        dtype: None: fp32 on a CPU and for GGUF files, otherwise the dtype of the stored weights. `torch_dtype` is the same.
        device: None: the GPU if there is one. With a `device_map`, which takes its place, there is none.
        trust_remote_code: run code that comes with the model.
        options: passed on to `AutoModelForCausalLM.from_pretrained`: revision, token, device_map, quantization_config,
            attn_implementation and others. Those of the hub go to the tokenizer too.
    """
    if not isinstance(name, str | Path):
        raise TypeError(f"name must be a str or a Path, found {type(name).__name__}. {GIVE}")
    check_model(str(name))
    _check_options(str(name), dtype, device, options)
    place = _device(device)
    stored: Any = torch.float32 if place.type == "cpu" else "auto"
    wanted = _dtype(options.pop("torch_dtype", None) if dtype is None else dtype) or stored
    if "quantization_config" in options:  # libraries quantize weights where they put them
        options.setdefault("device_map", {"": place})
    model, tokenizer = _read(str(name), wanted, trust_remote_code, options)
    tokenizer.padding_side = "left"
    return Loaded((model if "device_map" in options else model.to(place)).eval(), tokenizer)


def _check_options(name: str, dtype: Any, device: Any, options: dict[str, Any]) -> None:
    if dtype is not None and "torch_dtype" in options:
        raise TypeError("dtype and torch_dtype are the same setting. Give one of them.")
    if device is not None and "device_map" in options:
        raise TypeError("device and device_map both say where the model goes. Give one of them.")
    for option in REFUSED & options.keys():
        raise TypeError(
            f"load_model takes no {option}. Load the model with transformers, and give model and tokenizer to TIDE."
        )
    if name.endswith(".gguf") and "quantization_config" in options:
        raise ValueError("a GGUF file is unpacked when it is loaded, without a quantization_config. Leave it out.")


def _device(device: str | torch.device | None) -> torch.device:
    place = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        seen = f"torch {torch.__version__} sees {count} CUDA GPUs"
        raise ValueError(f"there is no device '{place}': {seen}. Leave device out, or give 'cpu'.")
    return place


def _dtype(dtype: torch.dtype | str | None) -> Any:
    """Return a dtype that may be given by name; "auto" stays as it is."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(resolved := getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError(f"dtype must be a torch dtype, its name or 'auto', found {dtype!r}. Give torch.bfloat16, for example.")
    return resolved


def _read(name: str, dtype: Any, trust_remote_code: bool, options: dict[str, Any]) -> Loaded:
    if name.endswith(".gguf") and Path(name).is_file():
        return read_gguf(Path(name), torch.float32 if dtype == "auto" else dtype, **options)
    if name == "default":
        name = str(default_model_path())
    hub = {option: value for option, value in options.items() if option in HUB_OPTIONS}
    source = model_source(name, **{option: value for option, value in hub.items() if option in SNAPSHOT_OPTIONS})
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code, **options)
        return Loaded(model, AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **hub))
    except OSError as problem:
        raise OSError(f"cannot load {name!r}: {EXPECTED}. ({problem})") from problem
    except Exception as problem:  # the type depends on the HTTP library in use
        if Path(source).is_dir() or (why := broken_answer(problem)) is None:
            raise
        raise OSError(f"cannot load {name!r}: {why}. Try again, or give a folder with a model.") from problem
