"""Thousands of damaged files, always the same ones: a Trace that keeps its contract or one clear line, never anything else."""

import contextlib
import gzip
import random
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from test_kineto import TABLES, small_events, text_of
from test_nsys import check_contract

from flopwise.errors import FlopwiseError
from flopwise.trace import kineto_stream
from flopwise.trace.kineto import read_kineto
from flopwise.trace.nsys import read_nsys
from quick import tenth


def mutated(whole: bytes, rng: random.Random) -> bytes:
    at, other = rng.randrange(len(whole)), rng.randrange(len(whole))
    tokens = [
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"null",
        b"-",
        b"1e999",
        b"NaN",
        b"\xff",
        b"\x00",
        b"9" * 30,
        b"{}",
        b'"ts":',
    ]
    kind = rng.randrange(6)
    if kind == 0:
        return whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
    if kind == 1:
        return whole[:at]
    if kind == 2:
        return whole[:at] + rng.choice(tokens) + whole[at:]
    if kind == 3:
        return whole[:at] + rng.choice(tokens) + whole[at + rng.randrange(1, 9) :]
    if kind == 4:
        return whole[:at] + whole[other : other + rng.randrange(1, 200)] + whole[at:]
    return whole[: min(at, other)] + whole[max(at, other) :]


@pytest.mark.parametrize("zipped", [False, True])
def test_thousands_of_kineto_mutations_give_a_trace_or_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.setattr(kineto_stream, "CHUNK_BYTES", 1500)  # several chunks, so that seams are hit as well
    rng = random.Random(20261115)
    whole = text_of(small_events()).encode()
    for _ in range(tenth(600 if zipped else 2400)):
        content = gzip.compress(whole, 1) if zipped else whole
        for _ in range(rng.randrange(1, 4)):
            content = mutated(content, rng) or b"{"
        path = tmp_path / "trace.json"
        path.write_bytes(content)
        try:
            trace = read_kineto(path)
        except FlopwiseError:
            continue
        assert all((getattr(trace, name)["end_ns"] >= getattr(trace, name)["start_ns"]).all() for name in TABLES)


def mutant_of(content: bytes, chance: random.Random) -> bytes:
    mutant = bytearray(content)
    if chance.randrange(10) == 0:
        return content[: chance.randrange(len(content))]
    for _ in range(chance.choice((1, 1, 3, 30))):
        at = chance.randrange(chance.choice((100, 4096, len(mutant))))
        size = chance.choice((1, 1, 2, 8))
        mutant[at : at + size] = bytes(chance.choice((0, 255, chance.randrange(256))) for _ in range(size))
    return bytes(mutant)


def trimmed(path: Path, rows: int = 12) -> bytes:
    """The same kind of export in a few small pages: what is damaged is then likely to be read."""
    db = sqlite3.connect(path)
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        if table.startswith(("NVTX", "CUPTI", "CUDA_GRAPH_NODE", "StringIds", "TARGET_INFO_GPU")):
            db.execute(f"DELETE FROM {table} WHERE rowid > {rows}" if table != "StringIds" else "SELECT 1")
        else:
            db.execute(f"DROP TABLE {table}")
    db.execute("DELETE FROM StringIds WHERE length(value) > 100")
    db.commit()
    db.execute("PRAGMA page_size = 512")
    db.execute("VACUUM")
    db.close()
    return path.read_bytes()


@pytest.mark.parametrize(("zipped", "count"), [(False, tenth(1300)), (True, max(150, tenth(300)))])
def test_thousands_of_nsys_mutations_give_a_trace_or_one_line(tmp_path, zipped, count):
    """Many small damages, in place: a Trace that keeps the contract or a FlopwiseError, never anything else."""
    made = tmp_path / "tiny.sqlite"
    options = ("--emit-nvtx", "--textid", "--graph", "node", "--steps", "1", "--layers", "1")
    generator = Path(__file__).parent / "gen_nsys.py"
    subprocess.run([sys.executable, "-B", generator, made, *options], check=True, capture_output=True)
    tiny = trimmed(made)
    assert len(tiny) < 32_000
    tiny = gzip.compress(tiny, 1) if zipped else tiny
    chance, target, read = random.Random(7), tmp_path / "mutant.sqlite", 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        target.write_bytes(mutant_of(tiny, chance))
        with contextlib.suppress(FlopwiseError):
            check_contract(read_nsys(target))
            read += 1
    assert 0 < read < count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)  # KiB
