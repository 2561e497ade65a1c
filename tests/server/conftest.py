"""Servers on a tiny model, one with exits and one without, for all tests that leave them as they were."""

from __future__ import annotations

import pytest

from policies import Everyone
from servers import Running, tiny


@pytest.fixture(scope="session")
def loaded():
    return tiny()


@pytest.fixture(scope="session")
def router():
    """Exits after the first of four layers."""
    return Everyone(1)


@pytest.fixture(scope="session")
def server(loaded, router):
    running = Running(loaded, router)
    yield running
    assert running.is_idle(), "a test left something running"
    running.close()


@pytest.fixture(scope="session")
def server_without_exits():
    running = Running(tiny())
    yield running
    assert running.is_idle(), "a test left something running"
    running.close()


@pytest.fixture
def another(router):
    """Starts servers with models and settings of a test's own."""
    started = []

    def start(settings=None, model=None, router=router):
        started.append(Running(model or tiny(), router, settings))
        return started[-1]

    yield start
    for running in started:
        running.close()
