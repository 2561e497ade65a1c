"""Packages of TIDE's extras, as in `pyproject.toml`, for errors that say what to install.

They name packages and not the extra: `pip install "tide-inference[…]"` would look for this version on the public index, which
has only the original's 0.2.1.
"""

from __future__ import annotations

import shlex

PACKAGES = {
    "datasets": ["datasets>=3"],
    "plots": ["matplotlib>=3.8"],
    "eval": ["lm_eval>=0.4.13,<0.5", "datasets>=3"],
    "serve": ["fastapi>=0.133", "uvicorn>=0.30", "prometheus-client>=0.20", "llguidance>=1.3"],
}


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f"pip install {shlex.join(PACKAGES[extra])}"
