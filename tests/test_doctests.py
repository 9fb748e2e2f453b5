"""Every example in a docstring is run."""

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import flopwise

ALWAYS = ("flopwise.errors", "flopwise.units", "flopwise.spec.fields", "flopwise.spec.workload", "flopwise.store.files")
OPTIONAL = ("torch", "triton", "transformers", "pynvml")


def load(name: str) -> ModuleType:
    """The module; one that needs a library which is not installed here is skipped."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] in OPTIONAL and name not in ALWAYS:
            pytest.skip(f"needs {error.name}")
        raise


SOURCE = Path(flopwise.__file__).parent
MODULES = sorted(
    ".".join(("flopwise", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_its_docstrings_hold(name):
    assert doctest.testmod(load(name)).failed == 0


def test_the_modules_that_need_no_torch_are_among_them():
    assert set(ALWAYS) <= set(MODULES)
