# Two commands do everything on a fresh clone with python3 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all fuzz check audit docs gallery pages format clean

demo: $(STAMP)
	$(BIN)/flopwise demo

# Minutes: all but what is marked slow, with a tenth of the fuzzing. Kernels are compiled for three GPU generations, and run
# in Triton's interpreter, which must be chosen before Triton is imported. Nothing needs a GPU.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal
test: $(STAMP)
	$(PYTEST) -m "not slow" tests
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/kernels

# Everything.
test-all: $(STAMP)
	FLOPWISE_TESTS=all $(PYTEST) tests
	FLOPWISE_TESTS=all TRITON_INTERPRET=1 $(PYTEST) tests/kernels

# The properties with examples that are new each time: for a defect that nobody has met yet.
fuzz: $(STAMP)
	FLOPWISE_TESTS=fuzz $(PYTEST) $$(grep -rl '@given' tests --include='*.py')

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Known vulnerabilities in what is installed here; the auditor has a place of its own.
audit: $(STAMP)
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	build/audit/bin/pip-audit --progress-spinner off --path $(VENV)/lib/python3.*/site-packages

# The documentation as a site in build/site; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# The documentation's pictures, from traces and runs that are in the repository.
H200 := tests/trace/fixtures/h200-small
gallery: $(STAMP)
	$(BIN)/python benchmarks/gallery.py
	$(BIN)/flopwise explain $(H200)-bf16-compiled-2steps.kineto.json.gz -o docs/images/waterfall.svg
	$(BIN)/flopwise explain $(H200)-fp32-naive-2steps.kineto.json.gz -o docs/explanation/images/waterfall-small-fp32-naive.svg

# All pages and parts of pages that are made by commands; the tests compare.
pages: $(STAMP)
	$(BIN)/python -m flopwise.cli.reference > docs/reference/cli.md
	$(BIN)/python -m flopwise.cli.reference levers > docs/reference/levers.md
	$(BIN)/python -m flopwise.advice.reference > docs/reference/findings.md
	$(BIN)/python benchmarks/lab_pages.py
	$(BIN)/python benchmarks/course_items.py
	$(BIN)/python benchmarks/docs_outputs.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Installed again only when what it installs has changed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing flopwise into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
