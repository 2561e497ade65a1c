# Every target makes what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
OLDEST := .venv-oldest
# bytecode is kept, so that a test process does not compile every module again; pip makes none, which takes longer than the import
# of the few modules that are used
export PYTHONDONTWRITEBYTECODE :=
PIP := -m pip install --quiet --no-compile --disable-pip-version-check

.PHONY: demo test test-all test-full test-oldest test-long test-eval test-wheel check bench results results-gpu results-quality site wheel clean

demo: $(VENV)/ready
	$(VENV)/bin/tide demo

test: $(VENV)/dev $(VENV)/warm
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not full"

# what `make test` leaves out: the other cases of long tables, the browser, the site, studies, generated code; then the oldest
# versions, and the wheel in an environment of its own
test-all: test-full test-oldest test-wheel

test-full: $(VENV)/dev $(VENV)/warm
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m full

# the families and exactness again, on the oldest transformers we support, through the models' own layers; and what its oldest
# version makes of our Triton kernels, which are compiled there, not run
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -n 2 tests/kernels/test_triton_launch.py tests/kernels/test_gluon_attention.py
	TIDE_BACKEND=modules $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not real" -k "not any_policy and not random_drafts and not row_in_a_batch" tests/engine/test_exactness.py tests/adapters

# property tests with thousands of examples each, others every time, and what else tries more then: one to two hours
test-long: $(VENV)/dev $(VENV)/warm
	TIDE_LONG=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal --timeout=0 -m "hypothesis or long"

# tide eval with the real harness, which `make test` does without: it brings 620 MB
test-eval: $(VENV)/dev $(VENV)/warm
	$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[dev,eval]"
	$(VENV)/bin/python -m pytest tests/evals tests/cli/test_cli_eval.py

check: $(VENV)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python docs/check_results.py

# docs/ as a site in site/, without the network; warnings, broken links among them, are errors
site: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

bench: $(VENV)/ready
	$(VENV)/bin/python benchmarks/bench_decode.py

# the README's figures again: make results DATA=dir, with spec_bench/question.jsonl and the data sets of tide eval below it
DATA ?= .
results: $(VENV)/dev $(VENV)/warm
	$(VENV)/bin/python benchmarks/results.py cpu --data $(DATA)

results-gpu: $(VENV)/dev $(VENV)/warm
	$(VENV)/bin/python benchmarks/results.py gpu --data $(DATA)

results-quality: $(VENV)/dev $(VENV)/warm
	$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[eval]"
	$(VENV)/bin/python benchmarks/results.py quality --data $(DATA)

# torch goes in first and exactly as pinned, so that nothing that follows brings another build of it
.PHONY: python-is-new-enough
python-is-new-enough:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'TIDE needs Python 3.11 or later; set PYTHON=/path/to/it' or 0)"

$(VENV)/ready: pyproject.toml constraints.txt | python-is-new-enough
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(VENV)/bin/python $(PIP) -c constraints.txt -e .
	touch $@

# the embedded model and the compiled layers are made at first use, which takes a minute or two: better here than in two tests at once
$(VENV)/warm: $(VENV)/ready
	$(VENV)/bin/tide generate Hello --temperature 0.7 --max-new-tokens 4 > /dev/null
	touch $@

$(VENV)/dev: $(VENV)/ready
	$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[dev]"
	touch $@

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt | python-is-new-enough
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP) -c constraints-oldest.txt "torch==$$(sed -n 's/^torch==//p' constraints-oldest.txt)"
	$(OLDEST)/bin/python $(PIP) -c constraints-oldest.txt -e ".[test]" triton
	touch $@

wheel: $(VENV)/dev
	rm -rf dist
	$(VENV)/bin/python -m build --wheel

# what a newcomer does, in an environment of its own: the wheel away from the source tree, and the README's quick start
test-wheel: wheel
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(PIP) -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	.venv-wheel/bin/python $(PIP) -c constraints.txt dist/*.whl
	cd / && $(CURDIR)/.venv-wheel/bin/python -c "import TIDE; print(TIDE.__version__, TIDE.TIDE, TIDE.TIDEConfig())"
	.venv-wheel/bin/tide --version
	awk '/^```/ {on = /python/ && !seen++; next} on' README.md > .venv-wheel/quick_start.py
	cd / && $(CURDIR)/.venv-wheel/bin/python $(CURDIR)/.venv-wheel/quick_start.py

clean:
	rm -rf $(VENV) $(OLDEST) .venv-wheel build dist site src/*.egg-info
