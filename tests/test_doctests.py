"""Every example in a docstring is run."""

import doctest
import importlib
import pkgutil
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


MODULES = sorted(m.name for m in pkgutil.walk_packages(flopwise.__path__, "flopwise.", onerror=lambda name: None))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_the_examples_in_its_docstrings_hold(name):
    assert doctest.testmod(load(name)).failed == 0


def test_the_modules_that_need_no_torch_are_among_them():
    assert set(ALWAYS) <= set(MODULES)
