"""A name of any length is matched in next to no time: patterns see its beginning, or do not backtrack."""

import time

import polars as pl
import pytest

from flopwise.trace import tables as t
from flopwise.trace.host import Host, Scopes
from flopwise.trace.nvtx import meaning
from flopwise.trace.tables import RANGES, Trace
from flopwise.work.kernel_class import classify
from flopwise.work.kernel_spelling import one_spelling
from flopwise.work.matmul_precision import matmul_precision

N = 20_000
PARTS = ("layers.0.", "a_loss_", "xmma_gemm_", "mean", "(", "Backward0")


@pytest.mark.parametrize("part", PARTS)
def test_a_long_name_takes_no_time(part):
    name = part * N + "."
    began = time.perf_counter()
    classify(name, name)
    matmul_precision(name)
    one_spelling(name)
    meaning(name)
    Scopes(Host(_ranged(name)))
    assert time.perf_counter() - began < 2


def _ranged(name: str) -> Trace:
    row = dict.fromkeys(RANGES, 0) | {"end_ns": 5, "kind": "annotation"}
    empty = {
        field: pl.DataFrame(schema=schema)
        for field, schema in {
            "kernels": t.KERNELS,
            "copies": t.COPIES,
            "launches": t.LAUNCHES,
            "graph_launches": t.GRAPH_LAUNCHES,
            "graph_runs": t.GRAPH_RUNS,
            "syncs": t.SYNCS,
            "ops": t.OPS,
        }.items()
    }
    return Trace(source="nsys", path="", names=(name,), ranges=pl.DataFrame([row], schema=RANGES), **empty)
