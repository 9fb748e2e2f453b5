"""simt: the verdict follows the rates by block size and by occupancy."""

import msgspec
import pytest
from made_rows import StandIn, measured, timed

from flopwise.errors import Unsupported
from flopwise.experiments.claims.simt import BLOCKS, EXPERIMENT, QUICK_SIZES, SHARED_KIB, lanes_share
from flopwise.records.experiment import Place

GPU = Place(device="cuda:0")


def made(lanes=lanes_share, gain=lambda occupancy: occupancy, occupied=lambda n: n / 8):
    """Arithmetic at the share of threads that exist, reads at the share of warps, a kernel that spills at fewer registers."""
    flops, moved = 10**10, 2**30
    blocks = [
        {"part": "block", "threads": n, "work_flops": flops, "rate_flops_per_s": 5e13 * lanes(n)} for n in QUICK_SIZES
    ]
    reads = [
        {"part": "reads", "at_once": at_once, "shared_bytes": kib * 1024, "blocks": 32, "moved_bytes": moved}
        | {"occupancy_share": share, "rate_bytes_per_s": 4e12 * (gain(share) if at_once == 1 else 1.0)}
        for at_once in (1, 8)
        for kib, share in zip(SHARED_KIB, (1.0, 0.69, 0.5, 0.25, 0.125), strict=True)
    ]
    kept = [
        {"part": "registers", "registers": 256 // n, "spilled_bytes": 0 if n < 3 else 400, "work_flops": flops}
        | {"occupancy_share": occupied(n), "rate_flops_per_s": 5e13 / n}
        for n in BLOCKS
    ]
    times = [1e9 * flops / row["rate_flops_per_s"] for row in blocks]
    times += [1e9 * moved / row["rate_bytes_per_s"] for row in reads]
    times += [1e9 * flops / row["rate_flops_per_s"] for row in kept]
    return [{**row, **timed(ns)} for row, ns in zip((*blocks, *reads, *kept), times, strict=True)]


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert (
        "With 12 % of the warps that fit, single reads get 500 GB/s, with 100 % 4.00 TB/s: 8.0 times as much."
        in yes.why
    )
    assert "8 reads at once get 4.00 TB/s and 4.00 TB/s." in yes.why
    no = pure(EXPERIMENT, made(lanes=lambda n: 1.0), GPU)
    assert (no.word, "Not as its warps say: a block of 33, 65 threads." in no.why) == ("refuted here", True)
    assert pure(EXPERIMENT, made(gain=lambda share: 1.0), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made(occupied=lambda n: 1.0), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made()[:-5], GPU).word == "inconclusive"


def test_what_would_run_on_a_gpu(monkeypatch):
    monkeypatch.setattr("flopwise.experiments.claims.simt.ARRAY_BYTES", 2**20)
    rows = msgspec.to_builtins(list(EXPERIMENT.measure(StandIn())))
    assert [row["part"] for row in rows] == ["block"] * len(QUICK_SIZES) + ["reads"] * 10 + ["registers"] * len(BLOCKS)
    assert {row["occupancy_share"] for row in rows if "occupancy_share" in row} == {1.0}
    with pytest.raises(Unsupported, match="needs a GPU"):
        measured(EXPERIMENT)
