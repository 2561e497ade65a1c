from __future__ import annotations

import functools
import importlib.util
import itertools
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

torch.set_num_threads(1)
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import once_per_launch

    once_per_launch()


SLOW = (  # files that take longest, the longest last
    "cli/test_quiet.py",
    "engine/test_host_rows.py",
    "calibration/test_calibrate.py",
    "integrations/test_libraries.py",
    "kernels/test_blocks.py",
    "kernels/test_triton_tokens.py",
    "kernels/test_triton_ops.py",
    "engine/test_rounds.py",
    "engine/test_sampled_texts.py",
    "engine/test_promises.py",
    "engine/test_distribution.py",
    "engine/test_batch.py",
)


def pytest_collection_modifyitems(config, items):
    """Run quick files first. xdist gives each worker an equal stretch of the list, so each stretch ends with slow files."""
    slow: dict[str, list[pytest.Item]] = {name: [] for name in SLOW}
    others: list[pytest.Item] = []
    for item in items:
        slow.get(_file(item), others).append(item)
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    quick = iter(others)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        own = [item for name in SLOW[worker::workers] for item in slow[name]]
        size = len(items) * (worker + 1) // workers - len(items) * worker // workers
        ordered += [*itertools.islice(quick, max(0, size - len(own))), *own]
    items[:] = [*ordered, *quick]


def _file(item: pytest.Item) -> str:
    """Folder and file."""
    return "/".join(item.path.parts[-2:])


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
