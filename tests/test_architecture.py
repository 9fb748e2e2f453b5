"""The laws of docs/architecture.md that no linter checks. Imports between rooms: import-linter, in `make check`."""

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from radon.complexity import cc_visit
from radon.visitors import Function

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "flopwise"
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = sorted(
    [f"{path.name}/" for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    + [path.name for path in SOURCE.glob("*.py") if path.stem not in ("__init__", "__main__", "version")]
)
MOST_COMPLEX = 15  # by radon; more needs a reason: `# complexity: …` above the function or on its first line
MOST_LINES = 450
VAGUE = {"utils", "common", "helpers", "misc"}
# Modules that import others by name: from a table in the same file, or what the user named.
LAZY_TABLES = {
    "__init__.py": "the public API: a name is imported when it is first asked for",
    "cli/main.py": "a verb's module is imported when the verb is called",
    "experiments/catalog.py": "an experiment is a file in claims/",
    "capture/factories.py": "the user's own factory, py:module:factory",
    "capture/loop/script.py": "the user's own script or module, and the moment it imports torch",
    "store/files.py": "whether fcntl is there",
}


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def functions(text: str) -> list[Function]:
    """Every function and method, and every function in one."""
    found = [block for block in cc_visit(text) if isinstance(block, Function)]
    return found + [closure for function in found for closure in function.closures]


def has_a_reason(function: Function, lines: list[str]) -> bool:
    """In a comment on the function's first line, or in those directly above it and its decorators."""
    above = function.lineno - 2
    while above >= 0 and re.match(r"\s*@", lines[above]):
        above -= 1
    comments = [lines[function.lineno - 1]]
    while above >= 0 and re.match(r"\s*#", lines[above]):
        comments.append(lines[above])
        above -= 1
    return any(re.search(r"# complexity: \w", line) for line in comments)


def test_a_function_that_is_too_complex_says_why():
    found = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        found += [
            f"{name(path)}:{function.fullname}"
            for function in functions(text)
            if function.complexity > MOST_COMPLEX and not has_a_reason(function, text.splitlines())
        ]
    assert found == []


IFS = "def f(x):\n" + "".join(f"    if x == {n}:\n        return {n}\n" for n in range(MOST_COMPLEX))
OVER = [("", False), ("# complexity: a table of cases\n", True), ("# complexity:\n", False), ("# why\n", False)]


@pytest.mark.parametrize(("comment", "allowed"), OVER)
@pytest.mark.parametrize("decorator", ["", "@cache\n"])
def test_the_complexity_law_can_fail(comment, decorator, allowed):
    text = f"{comment}{decorator}{IFS}"
    (function,) = functions(text)
    assert function.complexity == MOST_COMPLEX + 1
    assert has_a_reason(function, text.splitlines()) == allowed


def test_no_file_is_long():
    long = [name(path) for path in FILES if path.read_text(encoding="utf-8").count("\n") >= MOST_LINES]
    assert long == []


def test_the_formatter_is_never_switched_off():
    off = [name(path) for path in FILES if re.search(r"# fmt: ?(skip|off)", path.read_text(encoding="utf-8"))]
    assert off == []


BY_STRING = ("import_module", "__import__", "find_spec", "run_module", "resolve_name")


def imports_by_string(text: str) -> bool:
    """Whether anything is imported by a name that is made when the program runs."""
    if not any(word in text for word in BY_STRING):
        return False
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word) if word in BY_STRING:
                return True
            case _:
                pass
    return False


def test_nothing_is_imported_by_string_but_from_a_known_table():
    found = {name(path) for path in FILES if imports_by_string(path.read_text(encoding="utf-8"))}
    assert sorted(found) == sorted(LAZY_TABLES)


@pytest.mark.parametrize(
    "text", ["import importlib\nimportlib.import_module('a')", "from importlib import import_module", "__import__('a')"]
)
def test_an_import_by_string_is_seen(text):
    assert imports_by_string(text)


def test_no_module_is_a_place_for_anything():
    assert [name(path) for path in SOURCE.rglob("*") if path.stem in VAGUE] == []


def named_in_the_page() -> set[str]:
    """Rooms and files of src/flopwise, as docs/architecture.md names them: `room/`, `room/file.py`."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `(\w+/)` \|", page, re.MULTILINE)
    files = re.findall(r"`((?:[a-z_]+/)*[a-z_]+)\.py`", page)
    return {*rooms, *(f"{file}.py" for file in files if file not in VAGUE)}


def test_every_room_is_in_the_architecture_page():
    assert sorted(set(ROOMS) - named_in_the_page()) == []


def test_what_the_architecture_page_names_is_there():
    assert sorted(one for one in named_in_the_page() if not (SOURCE / one).exists()) == []


def test_the_sdist_has_all_that_a_checkout_has():
    """Its tests read benchmarks, docs and sweeps; what begins with a dot is for a checkout alone."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = ["pyproject.toml", "PKG-INFO", *settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]]
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    here = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {name for name in here if not any(fnmatch(name, one) for one in (*shipped, *ignored))} == set()
