"""What is timed is the cost of a step as rounds have it: by the clock on a CPU, the device's work on a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from TIDE.calibration import timing


def an_adapter(kind: str):
    return SimpleNamespace(device=torch.device(kind))


def test_the_work_of_a_gpu_is_the_sum_of_its_kernels():
    kinds = [(DeviceType.CUDA, 250.0), (DeviceType.CPU, 9000.0), (DeviceType.CUDA, 750.0)]
    events = [SimpleNamespace(device_type=kind, device_time=microseconds) for kind, microseconds in kinds]
    assert timing.work_of(events) == pytest.approx(0.001)
    assert timing.work_of([]) == 0


def test_on_a_gpu_its_work_is_timed_not_the_host(monkeypatch):
    monkeypatch.setattr(timing, "_busy", lambda action: 0.25)
    assert timing.timed(an_adapter("cuda"), lambda: None) == 0.25
    assert timing.timed(an_adapter("cpu"), lambda: time.sleep(0.001)) < 0.2


def test_without_a_profiler_the_clock_is_taken(monkeypatch):
    monkeypatch.setattr(timing, "_busy", lambda action: 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *given: None)
    assert 0.001 < timing.timed(an_adapter("cuda"), lambda: time.sleep(0.001)) < 0.2


def test_a_profiler_that_fails_is_logged(monkeypatch, caplog):
    def fails(**options):
        raise RuntimeError("another one is at work")

    monkeypatch.setattr(timing, "profile", fails)
    assert timing._busy(lambda: None) == 0
    assert "another one is at work" in caplog.text
