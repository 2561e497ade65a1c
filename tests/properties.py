"""How many examples a property test tries: a few by default, thousands with TIDE_LONG=1 (`make test-long`)."""

from __future__ import annotations

import os

import hypothesis

# a busy machine is no bug, and models are slow
PATIENT = dict(deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.register_profile("few", derandomize=True, **PATIENT)
hypothesis.settings.register_profile("long", max_examples=2000, print_blob=True, **PATIENT)
IS_LONG = os.environ.get("TIDE_LONG") == "1"
hypothesis.settings.load_profile("long" if IS_LONG else "few")


def examples(few: int) -> hypothesis.settings:
    """Try so many, or as many as the long profile says."""
    return hypothesis.settings() if IS_LONG else hypothesis.settings(max_examples=few)
