# Two commands do everything on a fresh clone with python3 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all fuzz check docs gallery format clean

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

# The documentation as a site in build/site; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# The pages of docs/gallery, from traces and runs that are in the repository.
gallery: $(STAMP)
	cd docs/gallery && ../../$(BIN)/flopwise report ../../tests/trace/fixtures/h200-small-fp32-naive-2steps.kineto.json.gz -o small-fp32-naive.md --pictures
	cd docs/gallery && ../../$(BIN)/flopwise report ../../tests/trace/fixtures/h200-small-bf16-compiled-2steps.kineto.json.gz -o small-bf16-compiled.md --pictures
	cd docs/gallery && ../../$(BIN)/flopwise report ../../benchmarks/results/h200-2026-11/launch-bound ../../benchmarks/results/h200-2026-11/course-attention -o sweeps.md --pictures
	cd docs/gallery && ../../$(BIN)/flopwise report ../../benchmarks/results/h200-2026-11-tune-final/small-4x512 -o tune-small.md --pictures

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
