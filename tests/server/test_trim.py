"""A server that has nothing to do gives free memory back."""

from __future__ import annotations

import platform
import re
import time
from pathlib import Path

import pytest

from TIDE.server import worker
from TIDE.server.worker import trim

PIECE = 50_000  # bytes: below what the C library maps by itself


def resident() -> int:
    match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing")
def test_memory_between_pieces_that_are_held_is_given_back():
    pieces = [bytearray(PIECE) for _ in range(4000)]
    held = pieces[::40]
    del pieces
    before = resident()
    trim()
    assert before - resident() > 100e6
    assert len(held) == 100


def test_an_idle_worker_trims_once_after_every_request(server, monkeypatch):
    trims = []
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(worker, "trim", lambda: trims.append(None))
    for requests in (1, 2):
        assert server.post("/v1/completions", prompt="hi", max_tokens=2).status_code == 200
        until = time.monotonic() + 60
        while len(trims) < requests and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)  # four times as long as it takes to be idle
        assert len(trims) == requests
