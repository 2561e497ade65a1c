from __future__ import annotations

import functools
import importlib.util
import os
import shutil

os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # the models are tiny and two workers share the machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import pytest
import torch

import properties  # noqa: F401  hypothesis' profiles
from characters import TEMPLATE, characters
from families import FAMILIES, KINDS, VOCAB, build
from levels import daily

pytest_plugins = ["times"]
torch.set_num_threads(1)
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import once_per_launch

    once_per_launch()

family = functools.cache(build)


@pytest.fixture(params=sorted(FAMILIES))
def any_model(request):
    """A tiny model of each family in turn. It is used again: tests leave it as it was, as engines do."""
    return family(request.param)


@pytest.fixture(params=daily(sorted(FAMILIES), KINDS))
def each_kind(request):
    """A tiny model of each kind of layer in turn; of all families in `make test-all`. It is used again, too."""
    return family(request.param)


@pytest.fixture
def llama():
    return build("llama")


@pytest.fixture
def prompts():
    """Three left-padded prompts of 5, 9 and 12 tokens, as (input_ids, attention_mask)."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (3, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, :3] = 0, 0
    ids[mask == 0] = 0
    return ids, mask


@pytest.fixture(scope="session")
def embedded():
    """The embedded default model and its tokenizer, downloaded on the first use of a machine."""
    import TIDE

    return TIDE.load_model("default", device="cpu")


@pytest.fixture(scope="session")
def plain():
    """A tokenizer without a chat template."""
    return characters(None)


@pytest.fixture(scope="session")
def chatty():
    """A tokenizer with a chat template."""
    return characters(TEMPLATE)


@pytest.fixture(scope="session")
def writer():
    return build("llama", max_position_embeddings=1024)
