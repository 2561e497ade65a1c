"""The number of threads follows what work takes: simulated machines with a clock of their own, and torch's number."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("numba")
from TIDE.kernels.cpu.threads import ThreadCount, torch_threads

LAYER = 0.001  # seconds on one thread


class Machine:
    """Cores, some of them taken by other programs. Threads without a core of their own make all others wait."""

    def __init__(self, cores):
        self.cores, self.taken, self.now = cores, 0, 0.0
        self.threads = 0
        self.pace = ThreadCount(clock=lambda: self.now)
        self.pace.allow(cores)

    def layer(self, kind="layer"):
        with self.pace.timed(kind):
            waits = self.threads > 1 and self.threads + self.taken > self.cores
            self.now += LAYER / self.threads * (10 if waits else 1)

    def seconds_of(self, layers, kind="layer"):
        began = self.now
        for _ in range(layers):
            self.layer(kind)
        return self.now - began


@pytest.fixture
def machine(monkeypatch, request):
    made = Machine(request.param)
    monkeypatch.setattr("TIDE.kernels.cpu.threads.use", lambda count: setattr(made, "threads", count))
    return made


@pytest.mark.parametrize("machine", [2, 4, 16], indirect=True)
def test_all_threads_are_used_on_a_quiet_machine(machine):
    machine.seconds_of(2000)
    assert machine.pace.count == machine.cores
    assert machine.seconds_of(20000) < 1.02 * 20000 * LAYER / machine.cores


@pytest.mark.parametrize("machine", [2, 4, 16], indirect=True)
def test_a_busy_core_is_left_to_others_and_taken_back_later(machine):
    machine.seconds_of(1000)
    machine.taken = 1
    begun = machine.seconds_of(300)
    assert machine.pace.count == machine.cores - 1
    assert begun < 2 * 300 * LAYER / (machine.cores - 1), "within a few layers"
    assert machine.seconds_of(10000) < 1.1 * 10000 * LAYER / (machine.cores - 1), "trials cost little"
    machine.taken = 0
    machine.seconds_of(int(8 / LAYER) * machine.cores)
    assert machine.pace.count == machine.cores


@pytest.mark.parametrize("machine", [2, 4, 16], indirect=True)
def test_a_stall_on_a_quiet_machine_costs_little(machine):
    machine.seconds_of(20000)
    machine.taken = machine.cores
    machine.seconds_of(3)
    machine.taken = 0
    quiet = 0.2 * machine.cores / LAYER  # layers in 0.2 seconds
    machine.seconds_of(int(quiet))
    assert machine.pace.count == machine.cores


@pytest.mark.parametrize("machine", [2, 4], indirect=True)
def test_a_machine_that_is_busy_from_the_start_is_noticed(machine):
    machine.taken = 1
    machine.seconds_of(300)
    assert machine.pace.count == machine.cores - 1


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_each_kind_of_work_is_compared_with_itself(machine):
    for _ in range(500):
        machine.seconds_of(30, "one token")
        with machine.pace.timed("eight tokens"):
            machine.now += 8 * LAYER / machine.threads
    assert machine.pace.count == 2


def test_torch_gets_the_users_number_of_threads_back(monkeypatch):
    numbers = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    with torch_threads.limited(2):
        assert (numbers[-1], torch_threads.most) == (2, 4)
        with torch_threads.limited(1):
            assert (numbers[-1], torch_threads.most) == (1, 4)
    assert numbers[-1] == torch_threads.most == 4


WORKQUEUE = """
import threading
import torch
import TIDE
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2)
model = LlamaForCausalLM(config).eval()
prompt = torch.arange(5)[None]
with TIDE.TIDE(model) as engine:
    expected = engine.generate(prompt, max_new_tokens=20, do_sample=False)
    import numba
    assert numba.threading_layer() == "workqueue"
    same = []
    def work():
        for _ in range(20):
            same.append(torch.equal(engine.generate(prompt, max_new_tokens=20, do_sample=False), expected))
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert same == [True] * 40, same
"""


@pytest.mark.full
def test_two_threads_generate_where_numba_has_no_openmp(monkeypatch):
    environment = dict(NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", WORKQUEUE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
