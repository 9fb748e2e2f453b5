"""Files of up to 100 MB that ask for much: what each costs before flopwise reads or refuses it.

    python benchmarks/attack/bounds.py [NAME ...] [--mb 99]

Every file is generated, read in a process of its own, and deleted. The aim is that of compressed.py: under 20 CPU seconds
and 1 GB, or one line that says why it is refused.
"""

import argparse
import json
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from compressed import Cases, attack

LARGEST = 99_000_000
SIZE = LARGEST  # of the files
Event = str


def trace(events: Callable[[], Iterable[Event]], path: Path, around: str = '{"traceEvents": [%s]}') -> None:
    """As many of these events as fit."""
    head, tail = around.split("%s")
    left = SIZE
    with path.open("w") as file:
        file.write(head)
        for place, event in enumerate(events()):
            left -= file.write("," + event if place else event)
            if left < 0:
                break
        file.write(tail)


def span(cat: str, name: str, start: float, length: float, tid: int = 1, pid: int = 1, args: str = "") -> Event:
    more = f',"args":{{{args}}}' if args else ""
    return f'{{"ph":"X","cat":"{cat}","name":"{name}","pid":{pid},"tid":{tid},"ts":{start},"dur":{length}{more}}}'


def counted(event: Callable[[int], Event]) -> Callable[[], Iterator[Event]]:
    return lambda: (event(i) for i in range(SIZE))


def launched(i: int, **of_kernel: int) -> Event:
    """A call and its kernel."""
    call = span("cuda_runtime", "cudaLaunchKernel", 2 * i, 1, args=f'"correlation":{i + 1}')
    given = "".join(f',"{name}":{value}' for name, value in of_kernel.items())
    return call + "," + span("kernel", "k", 2 * i + 1, 1, 7, 0, f'"correlation":{i + 1}{given}')


def with_kernel(events: Callable[[], Iterator[Event]], n: int = 1000) -> Callable[[], Iterator[Event]]:
    """Some launches first, so that there is GPU work to explain."""

    def both() -> Iterator[Event]:
        yield from (launched(i) for i in range(n))
        yield from events()

    return both


def nested(depth: int) -> Callable[[int], Event]:
    return lambda i: span("user_annotation", f"r{i % 9}", i, 4 * depth - 2 * i)


def long_paths() -> Iterator[Event]:
    """A hundred thousand ranges, each with a launch, inside fifty of long names: their paths are of 5 GB."""
    for i in range(50):
        yield span("user_annotation", f"{i:03}" + "n" * 1000, i, 4e6)
    for i in range(SIZE // 990):
        yield span("user_annotation", f"leaf {i}", 100 + 10 * i, 9)
        yield span("cuda_runtime", "cudaLaunchKernel", 101 + 10 * i, 1, args=f'"correlation":{i + 1}')
        yield span("kernel", "k", 102 + 10 * i, 1, 7, 0, f'"correlation":{i + 1}')


def steps(i: int) -> Event:
    return span("user_annotation", f"ProfilerStep#{i}", 2 * i, 2) + "," + launched(i)


def graphs(i: int) -> Event:
    node = f'"correlation":1,"graph node id":{i + 1}'
    kernel = span("kernel", f"k{i % 7}", 2 * i + 1, 1, 7, 0, node)
    return span("cuda_runtime", "cudaGraphLaunch", 0, 1, args='"correlation":1') + "," + kernel if i == 0 else kernel


def collective(i: int) -> Event:
    args = (
        f'"correlation":{i + 1},"Collective name":"allreduce","Process Group Ranks":"{[i, *range(40)]}","dtype":"Float"'
    )
    return span("kernel", "ncclDevKernel", 2 * i, 1, 7, 0, args + ',"In msg nelems":9,"Seq":1')


def inputs(i: int) -> Event:
    args = f'"Input Dims":[[{i},{i + 1}],[{i + 1},7]],"Input type":["float","float"],"Concrete Inputs":["",""]'
    return span("cpu_op", "aten::mm", 2 * i, 1, args=args)


def sequences(i: int) -> Event:
    """A forward op and its gradient on another thread, a million times under one number."""
    forward = span("cpu_op", "aten::mm", 2 * i, 1, args='"Sequence number":5,"Fwd thread id":0')
    return forward + "," + span("cpu_op", "MmBackward0", 2 * i, 1, 2, args='"Sequence number":5,"Fwd thread id":1')


def text(content: str, path: Path) -> None:
    path.write_text(content)


def repeated(head: str, body: str, tail: str, path: Path, most: int = LARGEST) -> None:
    with path.open("w") as file:
        file.write(head)
        for _ in range(min(most, SIZE) // (len(body) * 1000)):
            file.write(body * 1000)
        file.write(tail)


KERNEL = (
    "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
    "(start, end, deviceId, streamId, correlationId, demangledName, globalPid, graphNodeId)"
)
RUNTIME = "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)"
NVTX = "CREATE TABLE NVTX_EVENTS (start, end, eventType, globalTid, text)"
NODES = "CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start, end, globalTid, graphNodeId, originalGraphNodeId)"


def export(path: Path, **rows: tuple[str, Callable[[int], tuple[object, ...]], int]) -> None:
    """An Nsight Systems export with these tables: how it is made, a row by its number, how many."""
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "kernel"), (2, "cudaLaunchKernel_v7000")])
        for made, row, count in rows.values():
            db.execute(made)
            name = made.split()[2]
            marks = ",".join("?" * len(row(0)))
            scaled = max(1, count * SIZE // LARGEST)
            db.executemany(f"INSERT INTO {name} VALUES ({marks})", (row(i) for i in range(scaled)))
    db.close()


def kernel_row(i: int, stream: int = 7, length: int = 5) -> tuple[object, ...]:
    return (10 * i, 10 * i + length, 0, stream, i + 1, 1, 1 << 24, None)


def call_row(i: int) -> tuple[object, ...]:
    return (10 * i, 10 * i + 1, (1 << 24) + 1, i + 1, 2)


def nvtx_row(i: int, name: str = "range", depth: int = 0) -> tuple[object, ...]:
    return (i, 2 * depth - i if depth else i + 5, 59, (1 << 24) + 1, name.format(i))


def schema(path: Path) -> None:
    """Tables without end, views under the names that are looked for, triggers, and columns that are computed."""
    export(path, kernels=(KERNEL, kernel_row, 1000))
    with sqlite3.connect(path) as db:
        for i in range(10_000):
            db.execute(f"CREATE TABLE t{i} (a, b, c)")
        db.execute(
            "CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        )
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end AS (length(hex(zeroblob(300000000)))), globalTid)"
        )
        db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start) VALUES (1), (2), (3)")
        db.execute("CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN SELECT 1; END")
    db.close()


def cyclic(path: Path) -> None:
    """The root pages of two tables name each other's."""
    export(path, kernels=(KERNEL, kernel_row, 100_000), calls=(RUNTIME, call_row, 100_000))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET rootpage = 1 WHERE name LIKE '%KERNEL'")
        db.execute("UPDATE sqlite_master SET rootpage = 2 WHERE name LIKE '%RUNTIME'")
    db.close()


def rocprof(body: str, path: Path) -> None:
    head = '{"rocprofiler-sdk-tool": [{"metadata": {"pid": 1}, "agents": [], "kernel_symbols": [], "buffer_records": '
    repeated(head + '{"kernel_dispatch": [{}', "," + body, "]}}]}", path)


KINETO: dict[str, Callable[[Path], None]] = {
    "kernels and their calls": partial(trace, counted(launched)),
    "kernels alone": partial(trace, counted(lambda i: span("kernel", "k", i, 1, 7, 0))),
    "small ops": partial(trace, counted(lambda i: span("cpu_op", "a", i, 1))),
    "a thread per op": partial(trace, with_kernel(counted(lambda i: span("cpu_op", "aten::mm", i, 1, tid=i)))),
    "a process per op": partial(trace, with_kernel(counted(lambda i: span("cpu_op", "aten::mm", i, 1, pid=i)))),
    "a stream per kernel": partial(trace, counted(lambda i: launched(i, stream=i))),
    "a device per kernel": partial(trace, counted(lambda i: launched(i, device=i))),
    "sixty-four devices": partial(trace, counted(lambda i: launched(i, device=i % 64))),
    "ranges nested 800,000 deep": partial(trace, with_kernel(counted(nested(800_000)))),
    "ops at one time": partial(trace, with_kernel(counted(lambda i: span("cpu_op", "aten::mm", 5, 9)))),
    "long paths": partial(trace, long_paths),
    "a step per kernel": partial(trace, counted(steps)),
    "one graph of all kernels": partial(trace, counted(graphs)),
    "a graph per kernel": partial(
        trace, counted(lambda i: launched(i, **{"graph node id": i + 1}).replace("cudaLaunchKernel", "cudaGraphLaunch"))
    ),
    "collectives": partial(trace, counted(collective)),
    "inputs of ops": partial(trace, with_kernel(counted(inputs))),
    "one sequence number": partial(trace, with_kernel(counted(sequences))),
    "names of a letter": partial(trace, counted(lambda i: span("kernel", f"k<{i}>", i, 1, 7, 0))),
    "names of ops": partial(trace, with_kernel(counted(lambda i: span("cpu_op", f"op{i}", 2 * i, 1)))),
    "module names": partial(
        trace, with_kernel(counted(lambda i: span("python_function", f"nn.Module: L_{i}", 2 * i, 1)))
    ),
    "python functions": partial(
        trace, with_kernel(counted(lambda i: span("python_function", f"a.py({i}): f", 2 * i, 1)))
    ),
    "beginnings without an end": partial(
        trace, counted(lambda i: f'{{"ph":"B","cat":"cpu_op","name":"a","pid":{i},"ts":1}}')
    ),
    "brackets": lambda path: text('{"traceEvents": [{"args":' + "[" * SIZE, path),
    "brackets in every event": partial(
        trace, counted(lambda i: span("cpu_op", "a", i, 1, args='"x":' + "[" * 300 + "]" * 300))
    ),
    "one string": lambda path: text('{"traceEvents": [{"name":"' + "a" * SIZE + '"}]}', path),
    "strings of 10 MB": partial(trace, counted(lambda i: span("kernel", str(i) + "a" * 10_000_000, i, 1, 7, 0))),
    "one event of a million args": lambda path: text(
        '{"traceEvents": [' + span("kernel", "k", 1, 1, args=",".join(f'"a{i}":{i}' for i in range(1_000_000))) + "]}",
        path,
    ),
    "one number": lambda path: text('{"traceEvents": [{"ph":"X","cat":"kernel","ts":' + "9" * SIZE + "}]}", path),
    "long numbers": partial(trace, counted(lambda i: span("cpu_op", "a", i, 1, args='"correlation":' + "9" * 4000))),
    "numbers as text": partial(trace, counted(lambda i: span("cpu_op", "a", i, 1).replace('"pid":1', f'"pid":"x{i}"'))),
    "odd types": partial(trace, counted(lambda i: f'{{"ph":"X","cat":"cpu_op","name":["a"],"ts":"{i}","dur":"1"}}')),
    "bad escapes": partial(trace, counted(lambda i: span("cpu_op", "\\q\\ud800" * 9, i, 1))),
    "bare words": partial(trace, counted(lambda i: span("cpu_op", "a", i, float("nan")))),
    "spaces": partial(repeated, '{"traceEvents": [', " ", "]}"),
    "commas of one list": partial(repeated, "[", "0,", "0]"),
    "no list at all": partial(repeated, '{"a": "', "a", '"}'),
    "devices in the header": partial(
        repeated, '{"deviceProperties": [{}', ',{"id":1}', '], "traceEvents": []}', most=15_000_000
    ),
}
NSYS: dict[str, Callable[[Path], None]] = {
    "rows of kernels": lambda path: export(path, k=(KERNEL, kernel_row, 2_500_000)),
    "rows of kernels and calls": lambda path: export(
        path, k=(KERNEL, kernel_row, 1_300_000), c=(RUNTIME, call_row, 1_300_000)
    ),
    "kernels of one moment": lambda path: export(
        path, k=(KERNEL, lambda i: (0, 5, 0, 7, i, 1, 1 << 24, None), 3_300_000)
    ),
    "a stream per row": lambda path: export(path, k=(KERNEL, lambda i: kernel_row(i, i), 2_300_000)),
    "ranges nested 100,000 deep": lambda path: export(
        path,
        k=(KERNEL, kernel_row, 50_000),
        c=(RUNTIME, call_row, 50_000),
        n=(NVTX, lambda i: nvtx_row(i, "r", 100_000), 100_000),
    ),
    "ranges nested 2,000,000 deep": lambda path: export(
        path,
        k=(KERNEL, kernel_row, 50_000),
        c=(RUNTIME, call_row, 50_000),
        n=(NVTX, lambda i: nvtx_row(i, "r", 2_000_000), 2_000_000),
    ),
    "a text per range": lambda path: export(
        path, k=(KERNEL, kernel_row, 9), n=(NVTX, lambda i: nvtx_row(i, "range {0} of many"), 2_000_000)
    ),
    "ranges without an end": lambda path: export(
        path, k=(KERNEL, kernel_row, 9), n=(NVTX, lambda i: (i, None, 59, 1 << 24, "r"), 3_500_000)
    ),
    "nodes of graphs": lambda path: export(
        path, k=(KERNEL, kernel_row, 9), g=(NODES, lambda i: (i, i, 1 << 24, i, i - 1), 3_500_000)
    ),
    "texts of 16 MB": lambda path: export(
        path, k=(KERNEL, kernel_row, 9), n=(NVTX, lambda i: (i, i + 1, 59, 1 << 24, "a" * 16_000_000), 6)
    ),
    "words for numbers": lambda path: export(
        path, k=(KERNEL, lambda i: ("a", b"b", 1.5, "1e9", "x", 1, None, 1), 2_500_000)
    ),
    "a schema of views": schema,
    "a cyclic schema": cyclic,
}
OTHERS: Cases = {
    "rocprof: {}": ("explain", "r.json", partial(rocprof, "{}")),
    "rocprof: kernels": (
        "explain",
        "r.json",
        partial(rocprof, '{"start_timestamp":1,"end_timestamp":9,"dispatch_info":{"kernel_id":1}}'),
    ),
    "rocprof: nested": ("explain", "r.json", lambda path: rocprof("[" * 9999, path)),
    "config.json: brackets": ("account hf:", "config.json", lambda path: text("[" * SIZE, path)),
    "config.json: a number": (
        "account hf:",
        "config.json",
        lambda path: text('{"hidden_size": ' + "9" * SIZE + "}", path),
    ),
    "config.json: 10^9 layers": (
        "account hf:",
        "config.json",
        lambda path: text(
            json.dumps(
                {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 9}
            ),
            path,
        ),
    ),
    "sweep: TOML of brackets": ("sweep", "s.toml", lambda path: text("a = " + "[" * SIZE, path)),
    "sweep: TOML of keys": ("sweep", "s.toml", partial(repeated, "", "a.a.a.a = 1\n", "")),
    "sweep: a number": ("sweep", "s.toml", lambda path: text("a = " + "9" * SIZE, path)),
    "sweep: a name of 20,000 parts": ("sweep", "s.toml", lambda path: text("a." * 20_000 + "a = 1", path)),
    "snapshot: numbers": (
        "memory",
        "m.pickle",
        lambda path: path.write_bytes(b"\x80\x04](" + b"M\1\2" * (SIZE // 3) + b"e."),
    ),
    "snapshot: texts": (
        "memory",
        "m.pickle",
        lambda path: path.write_bytes(b"\x80\x04](" + b"\x8c\x02xy" * (SIZE // 4) + b"e."),
    ),
    "snapshot: brackets": ("memory", "m.pickle", lambda path: path.write_bytes(b"\x80\x04" + b"]" * SIZE + b".")),
    "snapshot: a number": (
        "memory",
        "m.pickle",
        lambda path: path.write_bytes(b"\x80\x04\x8b" + (SIZE).to_bytes(4, "little") + b"\x7f" * SIZE + b"."),
    ),
}
CASES: Cases = (
    {name: ("explain", "t.json", make) for name, make in KINETO.items()}
    | {f"nsys: {name}": ("explain", "t.sqlite", make) for name, make in NSYS.items()}
    | OTHERS
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(CASES))
    parser.add_argument("--mb", type=int, default=LARGEST // 10**6, help="size of the files")
    given = parser.parse_args()
    global SIZE
    SIZE = given.mb * 10**6
    names = given.names or list(CASES)
    print("| file | size | CPU | peak | exit code | first line |\n|---|---:|---:|---:|---|---|")
    kept = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            kept.append(attack(CASES, name, Path(scratch)))
    print(f"{sum(kept)} of {len(kept)} within the limits")
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
