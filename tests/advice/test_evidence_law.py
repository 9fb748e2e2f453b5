"""A finding claims no more than its evidence adds up to: on every trace there is, and on traces changed at random."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tests.public_traces import FILES

from flopwise.advice.findings import findings
from flopwise.advice.gather import facts_of
from flopwise.analysis.reading import explain_gpu_work
from flopwise.errors import FlopwiseError
from flopwise.trace.read import read_trace

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"
OWN = sorted(path for path in FIXTURES.iterdir() if path.name.endswith((".json.gz", ".sqlite.gz")))
SMALL = [path for path in (*OWN, *FILES) if path.stat().st_size < 300_000]
EPSILON = 1.0  # ns


@cache
def read(path):
    return read_trace(path)


def slower_gpu(trace, random):
    """Each piece of work takes up to three times as long, whatever runs beside it."""
    took = trace.kernels["end_ns"] - trace.kernels["start_ns"]
    longer = pl.Series((took.to_numpy() * random.uniform(0.3, 3, len(took))).astype(np.int64))
    return replace(trace, kernels=trace.kernels.with_columns(end_ns=trace.kernels["start_ns"] + longer))


def short_waits(trace, random):
    return replace(trace, syncs=trace.syncs.with_columns(end_ns=pl.col("start_ns") + 1000))


def long_waits(trace, random):
    """Waits from anywhere to anywhere, as a clock that jumps would write them."""
    longer = pl.Series(random.integers(0, 50_000_000, trace.syncs.height), dtype=pl.Int64)
    return replace(trace, syncs=trace.syncs.with_columns(end_ns=trace.syncs["end_ns"] + longer))


def lost_launches(trace, random):
    kept = pl.Series(random.random(trace.launches.height) < 0.7)
    return replace(trace, launches=trace.launches.filter(kept))


def no_names(trace, random):
    return replace(trace, frames=trace.frames.clear(), ranges=trace.ranges.clear())


def late_work(trace, random):
    """The GPU begins everything later and later."""
    late = pl.Series(np.cumsum(random.integers(0, 20_000, trace.kernels.height)), dtype=pl.Int64)
    kernels = trace.kernels.with_columns(
        start_ns=trace.kernels["start_ns"] + late, end_ns=trace.kernels["end_ns"] + late
    )
    return replace(trace, kernels=kernels)


CHANGES = (slower_gpu, short_waits, long_waits, lost_launches, no_names, late_work)


def check(trace):
    """The law, and that nothing is blamed for more than there is."""
    explained = explain_gpu_work(trace, None)
    e, facts = explained.explanation, facts_of(explained)
    for one in findings(facts):
        if one.saving_ns or one.draws_on:
            assert one.evidence_ns is not None, one.rule
            assert one.saving_ns <= one.evidence_ns + EPSILON, one.rule
            assert sum(one.draws_on.values()) <= one.evidence_ns + EPSILON, one.rule
        assert (one.evidence_ns or 0.0) <= max(e.gpu_ns, e.step_ns) + EPSILON, one.rule
        if one.rule == "host_syncs":
            assert one.evidence_ns <= sum(wait.waited_ns for wait in facts.details.waits) + EPSILON
    for cause, ns in e.idle.by_cause_ns.items():
        assert sum(one.idle_ns for one in e.blame if one.cause == cause) <= ns / e.steady_steps + EPSILON, cause
    assert sum(one.exposed_ns for one in e.transfers) <= e.busy_ns + EPSILON
    assert e.exposed_communication_ns <= e.busy_ns + EPSILON
    assert sum(one.counted_ns or 0.0 for one in findings(facts)) <= e.step_ns + EPSILON


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", [*OWN, *FILES], ids=lambda path: path.name[:45])
def test_on_every_trace(path):
    check(read(path))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.name[:45])
def test_on_changed_traces(path, change):
    with suppress(FlopwiseError):  # nothing was left to explain
        check(change(read(path), np.random.default_rng(0)))


@pytest.mark.parametrize("seed", range(8))
def test_on_traces_changed_in_several_ways(seed):
    random = np.random.default_rng(seed)
    trace = read(SMALL[seed % len(SMALL)])
    for change in random.permutation(len(CHANGES))[:3]:
        trace = CHANGES[change](trace, random)
    with suppress(FlopwiseError):
        check(trace)
