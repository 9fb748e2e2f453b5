"""Everything that is read from outside, files changed at random, and what must hold of the answer.

`TARGETS` has each format, with its corpus in tests/corpora. `tried` reads one file as the verbs do, with rendering, and says
what is wrong: anything but an answer or one line with a hint. `benchmarks/attack/mutations.py` extends the corpora.
"""

import copy
import gzip
import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flopwise.analysis.csv_timings import read_timings
from flopwise.api.account import account
from flopwise.api.compare import compare
from flopwise.api.explain import explain
from flopwise.api.runs import stored_result
from flopwise.errors import FlopwiseError
from flopwise.records.plan import read_plan
from flopwise.render.json import json_text
from flopwise.render.table import csv_text, markdown
from flopwise.render.views import view_of
from flopwise.snapshot.read import read_snapshot
from flopwise.snapshot.report import report as memory_report
from flopwise.spec.cluster import read_cluster
from flopwise.spec.recipe import read_toml, recipe_from
from flopwise.spec.sweep import read_sweep
from flopwise.store import list_runs
from flopwise.store.ceilings import load_ceilings

CORPORA = Path(__file__).parent / "corpora"
SOURCE = str(Path(__file__).parents[1] / "src" / "flopwise")
CPU_S = 60  # of one small file: more is a hang
ODD = (
    *(b"null", b"true", b"-1", b"0", b"1", b"1e999", b"-1e308", b"NaN", b"0.5", b"9" * 30, b"4294967296"),
    *(b'""', b"[]", b"{}", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"=", b"\n", b"\r", b"\x00",),
    *(b"18446744073709551616", b"\xff", b"\xed\xa0\x80", "\u202e".encode(), b"$(touch ran)"),
    *(b"../" * 8, b"/dev/zero", b"=cmd|'/c calc'!A1", b"__import__('os').system('touch ran')"),
    *(b"x" * 5000, b"[" * 3000, b"inf", b"-0", b"0x10", b"1_000", b"1979-05-27", b"cos\nsystem\n(S'touch ran'\ntR."),
)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\\n]|\\.)*"|-?\d[\w.+-]*|\w+')


class Target(NamedTuple):
    """A format: what the file is called, and what reads it."""

    name: str
    file: str
    read: Callable[[Path], Any]

    @property
    def corpus(self) -> dict[str, bytes]:
        """Its files by name, unpacked."""
        files = {path.name: path.read_bytes() for path in sorted((CORPORA / self.name).iterdir())}
        return {name: gzip.decompress(text) if name.endswith(".gz") else text for name, text in files.items()}


def _shown(found: Any) -> None:
    """As every form of output."""
    view = view_of(found)
    json_text(view.document)
    for table in view.tables:
        markdown(table)
        csv_text(table)


def _run(path: Path) -> None:
    """A header or rows, in a run whose other file is sound."""
    folder = path.parent
    for name in ("run.json", "points.jsonl"):
        if not (folder / name).exists():
            shutil.copy(CORPORA / "store-whole" / name, folder / name)
    list_runs(folder.parent)
    _shown(stored_result(folder))
    compare(folder, folder)


def _account(path: Path) -> None:
    _shown(account(f"hf:{path}", gpu=["h100"]))


def _ceilings(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOPWISE_CEILINGS", str(path.parent))
        if (found := load_ceilings("h200")) is not None:
            _shown(found)


def _request(path: Path) -> None:
    """A call of a tool, as the server hands it over; its folder holds a trace and a config."""
    from flopwise.integrations.mcp.folder import Folder
    from flopwise.integrations.mcp.server import answered

    try:
        asked = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict) or not isinstance(asked.get("arguments", {}), dict):
        raise FlopwiseError("it is no request", "the SDK refuses it")
    for target, name in ((KINETO, "trace.json"), (CONFIG, "config.json")):
        path.with_name(name).write_bytes(next(iter(target.corpus.values())))
    answer = answered(Folder.at(path.parent), str(asked.get("name")), asked.get("arguments", {}))
    text = answer.content[0].text
    if answer.is_error:
        message, _, hint = text.removeprefix("error: ").partition("; hint: ")
        raise FlopwiseError(message, hint)
    json.loads(text)


KINETO = Target("kineto", "trace.json", lambda path: _shown(explain(path)))
CONFIG = Target("config", "config.json", _account)
TARGETS = (
    KINETO,
    Target("nsys", "trace.sqlite", lambda path: _shown(explain(path))),
    Target("snapshot", "memory.pickle", lambda path: _shown(memory_report(read_snapshot(path)))),
    Target("store-header", "run.json", _run),
    Target("store-rows", "points.jsonl", _run),
    Target("sweep", "sweep.toml", lambda path: read_sweep(path).trials),
    Target("recipe", "recipe.toml", lambda path: recipe_from(read_toml(path, "recipe"))),
    Target("cluster", "cluster.toml", read_cluster),
    Target("ceilings", "h200.json", _ceilings),
    Target("plan", "plan.json", lambda path: _shown(read_plan(path))),
    CONFIG,
    Target("timings", "timings.csv", read_timings),
    Target("mcp", "request.json", _request),
)


VALUES = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300, math.inf, math.nan),
    *(
        "",
        "x",
        "0",
        "NaN",
        "cuda",
        "ok",
        "\ud800",
        "\u202e",
        "x" * 3000,
        "../../etc/passwd",
        [],
        [[]],
        {},
        {"a": 1},
        [1] * 300,
    ),
)


def mutated(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """In half of the cases of a value where its format has one, so that what reads it does not end at the syntax."""
    if chance.random() < 0.5 and (found := _with_other_value(content, chance)) is not None:
        return found
    return _mutated(content, chance, others)


def _with_other_value(content: bytes, chance: random.Random) -> bytes | None:
    """JSON, lines of JSON, or an SQLite file, still well formed; None: it is none of these."""
    if content.startswith(b"SQLite"):
        return _other_cell(content, chance)
    try:
        lines = [json.loads(content)]
    except (ValueError, RecursionError):
        try:
            lines = [json.loads(line) for line in content.splitlines()]
        except (ValueError, RecursionError):
            return None
    for _ in range(chance.choice((1, 1, 2, 4))):
        _change_within(lines, chance)
    return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n" * (len(lines) > 1)


def _change_within(whole: list[Any], chance: random.Random) -> None:
    """One value, however deep: another, gone, doubled, or one from elsewhere."""
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [whole]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else list(range(len(one))) if isinstance(one, list) else []
        places += [(one, key) for key in keys]
        todo += [one[key] for key in keys]
    if not places:
        return
    (inside, key), (from_inside, from_key) = chance.choice(places), chance.choice(places)
    match chance.randrange(5):
        case 0:
            del inside[key]
        case 1:
            inside[key] = copy.deepcopy(from_inside[from_key])
        case 2 if isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
            inside[key] = inside[key] * chance.choice((-1, 10, 1e6, 10**12))
        case _:
            inside[key] = copy.deepcopy(chance.choice(VALUES))


def _other_cell(content: bytes, chance: random.Random) -> bytes | None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        db.deserialize(content)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        for _ in range(chance.choice((1, 1, 3))):
            table = chance.choice(tables)
            columns = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
            values = [one for one in VALUES if isinstance(one, int | float | str) and one != "\ud800"]
            value = chance.choice([one for one in values if not isinstance(one, int) or abs(one) < 2**63])
            where = chance.choice(("", " WHERE rowid % 7 = 3", " WHERE rowid = 2"))
            db.execute(f'UPDATE OR IGNORE "{table}" SET "{chance.choice(columns)}" = ?{where}', (value,))
        return db.serialize()
    except sqlite3.Error:
        return None
    finally:
        db.close()


def _mutated(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """One to three changes: of a bit, of a word, of a piece."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = _changed(content, chance, others) or chance.choice(ODD)
    return content


def _changed(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(content))
    end = min(len(content), at + chance.choice((1, 2, 8, 64, 512)))
    match chance.randrange(14):
        case 0:
            return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        case 1:
            return content[:at] + content[end:]
        case 2:
            return content[:at] + content[at:end] * chance.choice((2, 3, 50)) + content[end:]
        case 3:
            return content[:at] + chance.choice(ODD) + content[at:]
        case 4:
            other = chance.choice(others)
            begin = chance.randrange(len(other))
            return content[:at] + other[begin : begin + chance.randrange(1, 200)] + content[end:]
        case 5:
            return content[:at]
        case _:  # a whole word by another, from here on: the way into what is checked after the syntax
            word = _TOKEN.search(content, at)
            if word is None:
                return content[:at] + content[end:]
            theirs = _TOKEN.findall(chance.choice(others))
            new = chance.choice(ODD) if chance.random() < 0.5 or not theirs else chance.choice(theirs)
            return content[: word.start()] + new + content[word.end() :]


class Outcome(NamedTuple):
    """What became of a file: an answer, a refusal, or what must not be."""

    refused: str = ""
    wrong: str = ""


def tried(target: Target, content: bytes, scratch: Path) -> Outcome:
    """The file, read in a folder of its own that is removed."""
    folder = scratch / "one"
    folder.mkdir()
    path = folder / target.file
    path.write_bytes(content)
    try:
        with pytest.MonkeyPatch.context() as patch, _watched(folder) as seen, _cpu_limit():
            patch.chdir(folder)
            patch.setattr(tempfile, "tempdir", str(folder))
            outcome = _outcome(target, path)
        executed = sorted({*seen, *(["a file 'ran'"] if list(folder.rglob("ran")) else [])})
        return Outcome(wrong=f"it did {executed}") if executed else outcome
    finally:
        shutil.rmtree(folder)


def _outcome(target: Target, path: Path) -> Outcome:
    try:
        target.read(path)
    except FlopwiseError as error:
        text = f"{error.message} | {error.hint}"
        clear = error.message and error.hint and text.isprintable() and len(text) < 1500
        clear = clear and not re.search(r"internal error|Traceback|object at 0x", text)
        return Outcome(refused=text) if clear else Outcome(wrong=f"refused badly: {text!r}")
    except Exception as error:  # noqa: BLE001  what nobody thought of
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last else ""
        return Outcome(wrong=f"{type(error).__name__}: {str(error)[:200]} at {where}")
    return Outcome()


_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "ctypes.dlopen")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "shutil.rmtree", "os.truncate")
_watching: list[tuple[str, set[str]]] = []  # a hook cannot be taken away: it looks while this is not empty


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    place, seen = _watching[-1]
    if event in _STARTS:
        seen.add(event)
    elif event in _CHANGES or (event == "open" and _writes(arguments)):
        file = os.path.abspath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if file and not file.startswith((place, "/dev/null")):
            seen.add(f"{event} {file}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


sys.addaudithook(_hook)


@contextmanager
def _watched(folder: Path) -> Iterator[set[str]]:
    """What is started, or changed outside the folder, meanwhile."""
    seen: set[str] = set()
    _watching.append((str(folder), seen))
    try:
        yield seen
    finally:
        _watching.pop()


@contextmanager
def _cpu_limit() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {CPU_S} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def lines_run() -> Iterator[set[tuple[str, int]]]:
    """The lines of flopwise that run meanwhile; by sys.monitoring where Python has it, ten times as fast."""
    found: set[tuple[str, int]] = set()
    if hasattr(sys, "monitoring"):
        with _monitored(found):
            yield found
        return

    def each(frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found.add((frame.f_code.co_filename, frame.f_lineno))
        return each

    sys.settrace(lambda frame, event, _: each if frame.f_code.co_filename.startswith(SOURCE) else None)
    try:
        yield found
    finally:
        sys.settrace(None)


@contextmanager
def _monitored(found: set[tuple[str, int]]) -> Iterator[None]:
    tool, events = sys.monitoring.COVERAGE_ID, sys.monitoring.events  # type: ignore[attr-defined,unused-ignore]

    def line(code: types.CodeType, number: int) -> Any:
        if code.co_filename.startswith(SOURCE):
            found.add((code.co_filename, number))
        return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]

    sys.monitoring.use_tool_id(tool, "fuzzing")  # type: ignore[attr-defined,unused-ignore]
    sys.monitoring.register_callback(tool, events.LINE, line)  # type: ignore[attr-defined,unused-ignore]
    sys.monitoring.restart_events()  # type: ignore[attr-defined,unused-ignore]
    sys.monitoring.set_events(tool, events.LINE)  # type: ignore[attr-defined,unused-ignore]
    try:
        yield
    finally:
        sys.monitoring.set_events(tool, 0)  # type: ignore[attr-defined,unused-ignore]
        sys.monitoring.free_tool_id(tool)  # type: ignore[attr-defined,unused-ignore]


def mutants(target: Target, seed: int, count: int) -> Iterator[bytes]:
    """Always the same ones for a seed."""
    chance = random.Random(f"{target.name} {seed}")
    files = list(target.corpus.values())
    make = partial(mutated, chance=chance, others=files)
    yield from (make(chance.choice(files)) for _ in range(count))
