"""Small files that ask for much: what each costs before flopwise reads or refuses it.

    python benchmarks/attack/compressed.py [NAME ...] [--keep FOLDER]

Every file is generated; none is larger than 110 MB. Each is read in a process of its own, interpreter start included. CPU
seconds are user + system and the peak is the resident set, both as the kernel counted them. The aim: under 20 CPU seconds and
1 GB, or one line that says why it is refused.
"""

import argparse
import gzip
import json
import os
import pickle
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

LIMIT_S, LIMIT_MB = 20.0, 1000.0
LONGEST_S = 60  # CPU seconds after which a case is ended
PAGE = 4096


def opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "wb")) if path.suffix == ".gz" else path.open("wb")


def pickle_of_events(path: Path, events: int = 3_000_000) -> None:
    """One event, repeated: every copy is a dict of its own once unpickled, and a few bits in the gzip file."""
    event = {"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 1, "frames": []}
    whole = pickle.dumps({"segments": [], "device_traces": [[event, dict(event), dict(event)]]}, protocol=2)
    second = whole.index(b"}", whole.index(b"action"))
    third = whole.index(b"}", second + 1)
    # Without memo puts a repeated event is the same bytes again.
    body = bytes(_without_puts(whole[second:third]))
    ends = whole.index(b"e", third)
    with opened(path) as file:
        file.write(whole[:second])
        for _ in range(events // 1000):
            file.write(body * 1000)
        file.write(whole[ends:])


def _without_puts(body: bytes) -> Iterator[int]:
    skipped = 0
    for place, byte in enumerate(body):
        if skipped:
            skipped -= 1
        elif byte == ord("q") and body[place - 1] in b"}]":
            skipped = 1
        else:
            yield byte


def pickle_of_zeros(path: Path, size: int = 2**31 - 2**20) -> None:
    """One long string of a single letter, just below two GiB."""
    with gzip.open(path, "wb") as file:
        file.write(b"\x80\x04\x8d" + size.to_bytes(8, "little"))
        for _ in range(size >> 20):
            file.write(b"a" * 2**20)
        file.write(b".")


def empty_events(path: Path, size: int = 1_200_000_000) -> None:
    """A list of events that say nothing."""
    with opened(path) as file:
        file.write(b'{"traceEvents": [{}')
        for _ in range(size // 3_000_000):
            file.write(b",{}" * 1_000_000)
        file.write(b"]}")


def kernel_names(path: Path, names: int = 100_000) -> None:
    """Kernels of which no two have the same name, each of 500 characters."""
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for i in range(names):
            name = f"void at::native::vectorized_elementwise_kernel<{i}, {'at::native::Functor<float, ' * 17}"[:500]
            args = {"device": 0, "stream": 7, "correlation": i + 1}
            kernel = {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": i * 10,
                "dur": 5,
                "args": args,
            }
            file.write("," * (i > 0) + json.dumps(kernel))
        file.write("]}")


def shared_pages(path: Path, pages: int = 650) -> None:
    """An Nsight Systems export whose table of kernels names the same page of rows again and again."""
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA page_size = {PAGE}")
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.execute("INSERT INTO StringIds VALUES (1, 'kernel')")
        columns = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, demangledName INTEGER"
        db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({columns}, globalPid INTEGER)")
        row = (10**18, 10**18 + 5, 0, 7, 10**9, 1, 1 << 40)
        rows = [(i, *row) for i in range(1, pages * 80)]
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL(rowid, start, end, deviceId, streamId, correlationId, "
                       "demangledName, globalPid) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)  # fmt: skip
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name LIKE 'CUPTI%'").fetchone()
    db.close()
    content = bytearray(path.read_bytes())
    count = len(content) // PAGE
    leaves = [n for n in range(2, count + 1) if content[(n - 1) * PAGE] == 0x0D and n > root]
    for leaf in leaves[10:]:  # all others become inner pages: three levels, each of which names its child 500 times
        level = 1 if leaf > leaves[20] else 2
        child = leaves[0] if level == 1 else leaves[21]
        _inner(content, leaf, child)
    _inner(content, root, leaves[15])
    path.write_bytes(content)


def _inner(content: bytearray, page: int, child: int) -> None:
    """Make of a page an inner one of a table's tree, all of whose children are one."""
    start, cells = (page - 1) * PAGE, 500
    content[start : start + PAGE] = bytes(PAGE)
    cell = child.to_bytes(4, "big") + b"\x01"
    first = PAGE - cells * len(cell)
    head = b"\x05\0\0" + cells.to_bytes(2, "big") + first.to_bytes(2, "big") + b"\0" + child.to_bytes(4, "big")
    content[start : start + 12] = head
    for i in range(cells):
        at = first + i * len(cell)
        content[start + 12 + 2 * i : start + 14 + 2 * i] = at.to_bytes(2, "big")
        content[start + at : start + at + len(cell)] = cell


Cases = dict[str, tuple[str, str, Callable[[Path], None]]]  # the command, the file's name, how it is made
CASES: Cases = {
    "one event, 3,000,000 times": ("memory", "events.pickle.gz", pickle_of_events),
    "one string of 2 GiB": ("memory", "zeros.pickle.gz", pickle_of_zeros),
    "the same, not compressed": ("memory", "events.pickle", pickle_of_events),
    "empty events, not compressed": ("explain", "empty.json", partial(empty_events, size=99_000_000)),
    "empty events": ("explain", "empty.json.gz", empty_events),
    "shared SQLite pages": ("explain", "shared.sqlite", shared_pages),
    "100,000 kernel names": ("explain", "names.json", kernel_names),
}


def _stop_some_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))


def attack(cases: Cases, name: str, folder: Path) -> bool:
    """Make the file, read it, print a row; whether it kept to the limits.

    `command:` takes the file in one word with it; {} stands for the file and {folder} for its folder, where the command has
    one of them; a last < gives it the file as its standard input.
    """
    verb, file, make = cases[name]
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        make(path)
    said = folder / "said"
    verb, piped = verb.removesuffix(" <"), verb.endswith(" <")
    words = verb if piped or "{" in verb else f"{verb}{'' if verb.endswith(':') else ' '}{{}}"
    command = [sys.executable, "-m", "flopwise", *(word.format(path, folder=path.parent) for word in words.split())]
    places = {"FLOPWISE_RUNS": str(folder / "runs"), "FLOPWISE_CEILINGS": str(path.parent)}
    with said.open("wb") as out, open(path if piped else os.devnull, "rb") as given:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=given,
            preexec_fn=_stop_some_time,
            env=os.environ | places,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
    cpu_s, peak_mb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6
    lines = said.read_text(errors="replace").splitlines() or [""]
    first = lines[0].replace(str(path), file).replace(str(path.parent), ".")
    size = f"{path.stat().st_size / 1e6:.2f} MB"
    print(f"| {name} | {size} | {cpu_s:.1f} s | {peak_mb:,.0f} MB | {code} | {first[:120]} |", flush=True)
    refused = code == 2 and len(lines) <= 2 and not lines[0].startswith("error: internal")  # the line, and its hint
    return cpu_s < LIMIT_S and peak_mb < LIMIT_MB and (refused or code in (0, 1, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--keep", type=Path, help="where the files are made and stay")
    given = parser.parse_args()
    print("| file | size | CPU | peak | exit code | first line |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [attack(CASES, name, folder) for name in given.names or CASES]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
