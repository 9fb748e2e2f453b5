"""memory-hierarchy: the verdict follows the levels; a chain goes through its whole working set; the CPU's levels are found."""

import pytest
import torch
from made_rows import measured, on_the_wall, timed

from flopwise.errors import Unsupported
from flopwise.experiments.claims import memory_hierarchy
from flopwise.experiments.claims.memory_hierarchy import (
    EXPERIMENT,
    KERNELS,
    L1,
    MEMORY,
    REGISTERS,
    SHARED,
    SOURCE,
    cpu_caches,
    draw,
    levels,
    tabulate,
    working_sets,
    write_chain,
)
from flopwise.records.experiment import Place

GPU, CPU = Place(device="cuda:0"), Place(device="cpu")
FOUND = {
    REGISTERS: (None, 4, 500e12),
    SHARED: (None, 30, 30e12),
    L1: (2**15, 40, 20e12),
    "L2": (2**23, 250, 6e12),
    MEMORY: (2**30, 800, 4e12),
}


def latency(level, size, cycles):
    clocks = {"latency_cycles": cycles, "latency_ns": cycles / 2, "steps": 1}
    return {"part": "latency", "level": level, "set_bytes": size, **clocks}


def bandwidth(level, size, rate):
    about = {"part": "bandwidth", "level": level, "set_bytes": size, "read_bytes_per_s": rate, "moved_bytes": 10**9}
    return {**about, **timed(1e18 / rate)}


def made(**other):
    """Rows of a GPU at 2 GHz, some of its levels replaced."""
    rows = [{"part": "cache", "level": "L2", "size_bytes": 60 * 2**20}]
    for level, (size, cycles, rate) in (FOUND | other).items():
        rows += [latency(level, size, cycles), bandwidth(level, None if level == L1 else size, rate)]
    return [*rows, latency(None, 2**20, 240), bandwidth(None, 2**20, 5e12)]


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "L2 125 ns (250 cycles), 6.00 TB/s" in yes.why
    assert (
        pure(EXPERIMENT, made(L2=(2**23, 900, 6e12)), GPU).word == "refuted here"
    )  # the cache answers later than memory
    assert pure(EXPERIMENT, made(L2=(2**23, 250, 3e12)), GPU).word == "refuted here"  # and brings less
    assert pure(EXPERIMENT, made(L2=(2**23, 780, 6e12)), GPU).word == "inconclusive"
    assert pure(EXPERIMENT, made()[:1], GPU).word == "not measurable here"  # the cache's size alone


def test_too_few_levels_or_a_level_out_of_place_are_no_evidence(pure):
    only = [row for row in made() if row["level"] in (REGISTERS, MEMORY)]  # a machine that tells nothing of its caches
    for place in (CPU, GPU):
        found = pure(EXPERIMENT, only, place)
        assert found.word == "inconclusive"
    assert "any cache" in pure(EXPERIMENT, only, CPU).why
    slow = pure(EXPERIMENT, made(L1=(2**15, 2_000_000, 20e12)), GPU)  # a millisecond
    assert slow.word == "refuted here"
    assert "latency, L1 to L2" in slow.why
    without = [row for row in made() if row["part"] != "bandwidth"]
    assert pure(EXPERIMENT, without, GPU).word == "inconclusive"


def test_times_that_are_not_known_well_leave_it_open(pure):
    def clocked(spread):
        """The CPU's rows, with a wall clock whose interval is so many times the median."""
        rows = [row for row in made()[1:] if row["level"] not in (SHARED, None)]
        return [on_the_wall({**row, **timed(100.0)}, 1 / spread, spread) for row in rows]

    assert pure(EXPERIMENT, clocked(1.01), CPU).word == "confirmed"
    assert pure(EXPERIMENT, clocked(3.0), CPU).word == "inconclusive"


def test_shared_memory_and_l1_of_a_gpu_are_one(pure):
    same = made(L1=(2**15, 28, 40e12))
    assert pure(EXPERIMENT, same, GPU).word == "confirmed"
    assert pure(EXPERIMENT, same, CPU).word == "refuted here"


def test_each_level_is_there_once_from_near_to_far():
    rows = EXPERIMENT.read(made())
    assert [row["level"] for row in levels(rows)] == list(FOUND)
    assert [len(picture.rows) for picture in draw(rows, GPU)] == [4, 3, 5]
    assert "latency_cycles" not in tabulate(rows, CPU)[0].keys


def test_the_gpus_kernels_are_there():
    source = SOURCE.read_text()
    assert [name for name in KERNELS if f" {name}(" not in source] == []


def test_a_chain_goes_through_all_of_its_set_and_back():
    buffer = torch.zeros(1024, dtype=torch.int64)
    start = at = write_chain(buffer, 4096, 64)
    seen = []
    for _ in range(4096 // 64):
        seen.append(at - start)
        at = int(buffer[(at - start) // 8])
    assert at == start
    assert sorted(seen) == list(range(0, 4096, 64))
    assert not buffer[512:].any()


def test_working_sets_double_and_hold_the_levels():
    assert working_sets(2**12, 2**15, {24576: L1}, quick=False) == [2**12, 2**13, 2**14, 24576, 2**15]
    assert working_sets(2**12, 2**15, {24576: L1}, quick=True) == [2**12, 24576, 2**15]


def test_caches_are_read_from_the_system(tmp_path):
    told = (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", ""))
    for n, values in enumerate(told):
        (tmp_path / f"index{n}").mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=True):
            (tmp_path / f"index{n}" / name).write_text(f"{value}\n")
    assert [(one.level, one.size_bytes) for one in cpu_caches(tmp_path)] == [("L1", 48 * 1024), ("L2", 2**21)]
    assert cpu_caches(tmp_path / "none") == []


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr(memory_hierarchy, "CPU_QUICK_LARGEST", 2**20)
    monkeypatch.setattr(memory_hierarchy, "cpu_caches", lambda: [memory_hierarchy.Cache("L1", 2**14)])
    try:
        rows = measured(EXPERIMENT)
    except Unsupported as error:
        pytest.skip(error.message)
    assert [row["level"] for row in levels(EXPERIMENT.read(rows))] == [REGISTERS, L1, MEMORY]
    assert all(row["latency_ns"] > 0 for row in rows if row["part"] == "latency")
    assert all(row["read_bytes_per_s"] > 0 for row in rows if row["part"] == "bandwidth")
    assert pure(EXPERIMENT, rows, CPU).why
