"""A model for tests of calibration, open for the length of one."""

from __future__ import annotations

import pytest

from families import build
from TIDE.adapters.adapter import ModelAdapter


@pytest.fixture
def adapter():
    adapter = ModelAdapter(build("llama"))
    yield adapter
    adapter.close()
