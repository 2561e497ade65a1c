"""What commands print beside their own: nothing of other libraries, and a line for each warning of TIDE."""

from __future__ import annotations

import subprocess
import sys

import pytest

from commands import SCRIPT, script
from families import CONTEXT

NOISE = """
import logging, warnings
from TIDE.cli.quiet import LIBRARIES, quiet, without_loading_bars

quiet()
quiet()
import torch, transformers
without_loading_bars()
for name in LIBRARIES:
    logging.getLogger(f"{name}.part").warning("noise")
warnings.warn("noise")
torch.tensor(torch.zeros(1))  # brings a warning
list(transformers.utils.logging.tqdm(range(3)))
logging.getLogger("TIDE.part").warning("of %s\\nlines", 2)
"""


def test_a_command_prints_its_answer_and_a_line_for_a_warning(folder):
    """Started afresh, as importing makes most of the noise."""
    done = script("generate", "hello " * 40, "--model", folder, "--no-exits", "--max-new-tokens", 24)
    assert done.returncode == 0 and done.stdout
    line, cut = done.stderr.splitlines()
    assert cut.startswith("cut at 24 tokens.")
    assert line.startswith("warning: ") and f"the {CONTEXT} tokens this model was made for" in line


def test_other_libraries_are_not_heard():
    done = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: of 2 lines\n")


@pytest.mark.full
def test_a_reader_that_leaves_early_is_no_error(folder):
    command = [SCRIPT, "generate", "hello", "again", "--model", folder, "--no-exits", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith('{"prompt": "hello"')
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=240) == 1 and said == ""
