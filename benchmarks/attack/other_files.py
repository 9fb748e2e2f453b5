"""Files of up to 100 MB that are no plain traces: stored runs, tokenizers, text, tables, requests, what is compressed.

    python benchmarks/attack/other_files.py [NAME ...] [--mb 99]

As bounds.py: every file is generated, read in a process of its own, and deleted; the same aim.
"""

import argparse
import base64
import gzip
import json
import os
import random
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import bounds
import msgspec
from bounds import repeated, text
from compressed import Cases, attack
from large_stores import point, trials

from flopwise.records.training import Begun, Settings, Steps
from flopwise.store import Run
from flopwise.store.rows import Appender

Make = Callable[[Path], None]
SEED = random.Random(1)


def in_run(make: Make, path: Path, kind: str = "sweep") -> None:
    """The file in a run that is otherwise as flopwise writes it."""
    store = path.parent.with_name("store")
    with Run.create(store, kind, "large", "flopwise", trials(2)) as run:
        for trial in trials(2):
            run.append(point(trial, SEED))
    shutil.rmtree(path.parent)
    shutil.move(store / run.id, path.parent)
    path.unlink(missing_ok=True)
    make(path)


def rows(records: Iterable[bytes], path: Path) -> None:
    """Sealed rows, as flopwise writes them."""
    with Appender(path) as table:
        for record in records:
            table.append(record, through=False)
            if path.stat().st_size > bounds.SIZE:
                return


def points(samples: int, path: Path) -> None:
    """Points of a sweep; with so many samples of each phase."""

    def encoded() -> Iterator[bytes]:
        for trial in trials(10_000) * 10:
            one = point(trial, SEED)
            phases = tuple(
                msgspec.structs.replace(
                    phase, wall_ns=phase.wall_ns[:1] * samples, gpu_ns=(), launch_ns=(), gpu_held=()
                )
                for phase in one.phases
            )
            yield msgspec.json.encode(msgspec.structs.replace(one, phases=phases))

    rows(encoded(), path)


def bare_points(path: Path) -> None:
    """Points that say nothing."""
    trial = json.dumps(json.loads(msgspec.json.encode(trials(1)[0])))
    rows((b'{"key":"%d","trial":%b,"status":"crash"}' % (n, trial.encode()) for n in count()), path)


def steps(path: Path) -> None:
    """The rows of a training, a step each."""
    settings = Settings(steps=10**9, data="corpus", rate=0.1)
    begun = Begun(settings=settings, parameters=9, vocabulary=9, tokens=9, flops_per_step=1e9, device="cpu")
    later = (
        msgspec.json.encode(Steps(step=n, losses=(1.5,), rate=0.1, wall_ns=9, waited_ns=1, launched_ns=1))
        for n in count(1)
    )
    rows((record for some in ([msgspec.json.encode(begun)], later) for record in some), path)


def header(path: Path) -> None:
    """A plan of many trials."""
    found = json.loads(path.with_name("kept.json").read_text())
    one = json.dumps(found["trials"][0])
    found["trials"] = []
    head, _, tail = json.dumps(found).partition('"trials": []')
    repeated(head + '"trials": [' + one, "," + one, "]" + tail, path)


def with_header(make: Make, path: Path) -> None:
    def kept(path: Path) -> None:
        make(path)
        path.with_name("kept.json").unlink(missing_ok=True)

    in_run(lambda path: None, path.with_name("nothing"))
    path.rename(path.with_name("kept.json"))
    kept(path)


def tokenizer(path: Path) -> None:
    """As many tokens as fit, as tiktoken writes them."""
    with path.open("wb") as file:
        for n in count():
            token = bytes([n]) if n < 256 else b"%d" % n
            file.write(base64.b64encode(token) + b" %d\n" % n)
            if file.tell() > bounds.SIZE:
                return


def tokenizer_json(path: Path) -> None:
    model = {"type": "BPE", "merges": [], "vocab": {}}
    whole = {"model": model, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}
    head, _, tail = json.dumps(whole).partition('"vocab": {}')
    with path.open("w") as file:
        file.write(head + '"vocab": {')
        for n in count():
            file.write(f'{"," * (n > 0)}"t{n}":{n}')
            if n % 1000 == 0 and file.tell() > bounds.SIZE:
                break
        file.write("}" + tail)


def words(distinct: int, path: Path) -> None:
    """Text of so many words."""
    with path.open("w") as file:
        for n in count():
            file.write(f"word{n * 7919 % distinct} ")
            if n % 1000 == 0 and file.tell() > bounds.SIZE:
                return


def packed(
    body: bytes, path: Path, head: bytes = b"", tail: bytes = b"", unpacked: int = 10**10, noise: int = 0
) -> None:
    """A gzip file of this body again and again, of random bytes (in base 64) each time if asked, up to 100 MB."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as out:
        out.write(head)
        block = body * (1 + 1_000_000 // len(body))
        written = 0
        while raw.tell() < bounds.SIZE and written < unpacked:
            written += out.write(block.replace(b"$", base64.b64encode(os.urandom(noise))) if noise else block)
        out.write(tail)


def members(body: bytes, path: Path) -> None:
    """A gzip file of many members, each of a few bytes."""
    one = gzip.compress(body)
    with path.open("wb") as file:
        file.write(gzip.compress(b'{"traceEvents": ['))
        for _ in range(bounds.SIZE // (1000 * len(one))):
            file.write(one * 1000)


def nested_gzip(path: Path) -> None:
    """A gzip file in a gzip file, eight times."""
    content = b'{"traceEvents": [' + b"{}," * 30_000_000
    for _ in range(8):
        content = gzip.compress(content)
    path.write_bytes(content)


def lying_gzip(path: Path) -> None:
    """A trailer that says it is small."""
    content = gzip.compress(b'{"traceEvents": [' + b" " * 400_000_000)
    path.write_bytes(content[:-4] + (1000).to_bytes(4, "little"))


def checkpoint(path: Path) -> None:
    """A run of `train` whose checkpoint is an archive of zeros."""
    in_run(steps_few, path.with_name("training.jsonl"), "train")
    (path.parent / "checkpoints").mkdir()
    place = path.parent / "checkpoints" / "step-00000001.pt"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for n in range(3):
            with archive.open(f"archive/data/{n}", "w", force_zip64=True) as member:
                for _ in range(1000):
                    member.write(bytes(1_000_000))
    path.write_bytes(place.read_bytes())


def steps_few(path: Path) -> None:
    kept, bounds.SIZE = bounds.SIZE, 1000
    steps(path)
    bounds.SIZE = kept


def requests(path: Path, body: str, tail: str = "") -> None:
    start = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": start}
    repeated(json.dumps(hello) + "\n", body, tail, path)


RUNS: dict[str, tuple[str, Make]] = {
    "points": ("points.jsonl", partial(points, 20)),
    "points of a million samples": ("points.jsonl", partial(points, 1_000_000)),
    "bare points": ("points.jsonl", bare_points),
    "rows of {}": ("points.jsonl", partial(repeated, "", "{}\n", "")),
    "empty rows": ("points.jsonl", partial(repeated, "", "\n", "")),
    "rows of nothing": ("points.jsonl", partial(repeated, "", "0\n", "")),
    "one row": ("points.jsonl", partial(repeated, '{"a":"', "a", '"}\n')),
    "brackets": ("points.jsonl", partial(repeated, "", "[", "")),
    "rows with false seals": ("points.jsonl", partial(repeated, "", '{"seal":"1-00000000-00000000"}\n', "")),
}
PACKED_EVENT = b'{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":5,"dur":1,"args":{"a":"$"}},'
CASES: Cases = {
    **{
        f"run: {name}": ("runs show {folder}", f"run/{file}", partial(in_run, make))
        for name, (file, make) in RUNS.items()
    },
    "run: all verbs: listed": (
        "runs --runs {folder}/..",
        "store0/run/points.jsonl",
        partial(in_run, RUNS["rows of {}"][1]),
    ),
    "run: all verbs: checked": ("runs check {folder}", "run/points.jsonl", partial(in_run, RUNS["rows of {}"][1])),
    "run: all verbs: points checked": ("runs check {folder}", "run/points.jsonl", partial(in_run, partial(points, 20))),
    "run: all verbs: compared": ("compare {folder} {folder}", "run/points.jsonl", partial(in_run, bare_points)),
    "run: all verbs: report": (
        "report {folder} -o {folder}/../page.html",
        "run/points.jsonl",
        partial(in_run, bare_points),
    ),
    "run: training": ("runs show {folder}", "run/training.jsonl", partial(in_run, steps, kind="train")),
    "run: training of {}": (
        "runs show {folder}",
        "run/training.jsonl",
        partial(in_run, RUNS["rows of {}"][1], kind="train"),
    ),
    "run: tuning of {}": (
        "runs show {folder}",
        "run/tuning.jsonl",
        partial(in_run, RUNS["rows of {}"][1], kind="tune"),
    ),
    "run: header of trials": ("runs show {folder}", "run/run.json", partial(with_header, header)),
    "run: header of brackets": ("runs show {folder}", "run/run.json", partial(with_header, RUNS["brackets"][1])),
    "run: header of spaces": (
        "runs show {folder}",
        "run/run.json",
        partial(with_header, partial(repeated, "{", " ", "}")),
    ),
    "run: tags": (
        "runs show {folder}",
        "run/tags.json",
        partial(in_run, partial(repeated, '{"tags":["a"', ',"b"', "]}")),
    ),
    "run: sums": ("runs show {folder}", "run/sums.json", partial(in_run, partial(repeated, "[", "0,", "0]"))),
    "run: checkpoint of zeros": ("generate {folder} --device cpu", "run/copy", checkpoint),
    "tokenizer: tiktoken": ("train tiny --device cpu --steps 1 --text README.md --tokenizer", "t.tiktoken", tokenizer),
    "tokenizer: lines": (
        "train tiny --device cpu --steps 1 --text README.md --tokenizer",
        "t.tiktoken",
        partial(repeated, "", "AA== 0\n", ""),
    ),
    "tokenizer: json": ("train tiny --device cpu --steps 1 --text README.md --tokenizer", "t.json", tokenizer_json),
    "tokenizer: brackets": (
        "train tiny --device cpu --steps 1 --text README.md --tokenizer",
        "t.json",
        RUNS["brackets"][1],
    ),
    "text: words": ("train tiny --device cpu --steps 1 --text", "t.txt", partial(words, 50_000)),
    "text: no word twice": ("train tiny --device cpu --steps 1 --text", "t.txt", partial(words, 10**9 + 7)),
    "text: one letter": ("train tiny --device cpu --steps 1 --text", "t.txt", partial(repeated, "", "a", "")),
    "text: no UTF-8": (
        "train tiny --device cpu --steps 1 --text",
        "t.txt",
        lambda path: path.write_bytes(b"\xff" * bounds.SIZE),
    ),
    "corpus: a manifest of numbers": (
        "train tiny --device cpu --data {folder}",
        "c/manifest.json",
        partial(repeated, "[", "0,", "0]"),
    ),
    "timings: rows": (
        "course tests/corpora/kineto/trace.json --csv",
        "t.csv",
        partial(repeated, "size,forward_ms\n", "small,1\n", ""),
    ),
    "timings: one cell": ("course tests/corpora/kineto/trace.json --csv", "t.csv", partial(repeated, 'a\n"', "a", '"')),
    "recipe: keys": ("bench tiny --device cpu --recipe", "r.toml", partial(repeated, "", "a.a.a = 1\n", "")),
    "cluster: keys": ("plan small --gpus 8 --tokens 1B --gpu", "c.toml", partial(repeated, "", "a.a.a = 1\n", "")),
    "config.json: expert lists": ("account hf:", "config.json", partial(repeated, '{"a": [0', ",0", "]}")),
    "script: prints": (
        "run {} --quiet",
        "s.py",
        lambda path: text("import sys\nfor _ in range(100):\n    sys.stdout.write('a' * 1_000_000)\n", path),
    ),
    "script: letters": ("run", "s.py", partial(repeated, "'", "a", "'\n")),
    "mcp: one request": ("mcp <", "requests", partial(requests, body="a")),
    "mcp: lines": ("mcp <", "requests", partial(requests, body="{}\n")),
    "mcp: empty lines": ("mcp <", "requests", partial(requests, body="\n")),
    "mcp: requests": ("mcp <", "requests", partial(requests, body='{"jsonrpc":"2.0","id":2,"method":"tools/list"}\n')),
    "gzip: spaces": ("explain", "t.json.gz", partial(packed, b" ", head=b'{"traceEvents": [')),
    "gzip: events, 40 times": (
        "explain",
        "t.json.gz",
        partial(packed, PACKED_EVENT, head=b'{"traceEvents": [', tail=b"{}]}", noise=18_000, unpacked=3 * 10**9),
    ),
    "gzip: members": ("explain", "t.json.gz", partial(members, b" ")),
    "gzip: empty members": ("explain", "t.json.gz", partial(members, b"")),
    "gzip: in gzip": ("explain", "t.json.gz", nested_gzip),
    "gzip: a trailer that lies": ("explain", "t.json.gz", lying_gzip),
    "gzip: nsys zeros": ("explain", "t.sqlite.gz", partial(packed, bytes(1000), head=b"SQLite format 3\0")),
    "gzip: nsys members": ("explain", "t.sqlite.gz", partial(members, b"")),
    "gzip: nsys, 49 times": (
        "explain",
        "t.sqlite.gz",
        partial(packed, b"$" + bytes(20_000), head=b"SQLite format 3\0", noise=250),
    ),
    "gzip: snapshot members": ("memory", "t.pickle.gz", partial(members, b"")),
    "gzip: rocprof of {}": (
        "explain",
        "t.json.gz",
        partial(
            packed, b",{}", head=b'{"rocprofiler-sdk-tool": [{"buffer_records": {"kernel_dispatch": [{}', tail=b"]}}]}"
        ),
    ),
    "scrub: spaces": (
        "runs scrub {} -o {folder}/out.json",
        "t.json.gz",
        partial(packed, b" ", head=b'{"traceEvents": ['),
    ),
    "scrub: nsys zeros": (
        "runs scrub {} -o {folder}/out.sqlite",
        "t.sqlite.gz",
        partial(packed, bytes(1000), head=b"SQLite format 3\0"),
    ),
    "scrub: members": ("runs scrub {} -o {folder}/out.json", "t.json.gz", partial(members, b"")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(CASES))
    parser.add_argument("--mb", type=int, default=bounds.SIZE // 10**6, help="size of the files")
    given = parser.parse_args()
    bounds.SIZE = given.mb * 10**6
    os.fsync = lambda fd: None
    names = [name for name in CASES if not given.names or any(name.startswith(one) for one in given.names)]
    print("| file | size | CPU | peak | exit code | first line |\n|---|---:|---:|---:|---|---|")
    kept = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            kept.append(attack(CASES, name, Path(scratch)))
    print(f"{sum(kept)} of {len(kept)} within the limits")
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
