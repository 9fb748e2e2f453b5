# Two commands do everything on a fresh clone with python3 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format clean

demo: $(STAMP)
	$(BIN)/flopwise demo

# The kernels: on the CPU and compiled for three GPU generations, then in Triton's interpreter. None needs a GPU.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests --ignore tests/kernels
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/kernels

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

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
