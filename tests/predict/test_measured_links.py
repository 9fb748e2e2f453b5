"""A cluster whose links were measured: a plan's exchanges take what was measured, and what was not stays as it was."""

import msgspec
import pytest

from flopwise.errors import FlopwiseError
from flopwise.predict.collectives import CollectiveRow, fit
from flopwise.predict.parallel.measured_links import with_measured_links
from flopwise.predict.parallel.step import planned_step
from flopwise.predict.parallel.topology import Group, exchange_s
from flopwise.spec.cluster import cluster
from flopwise.spec.layout import Job, Layout
from flopwise.spec.model import preset
from flopwise.spec.planned_model import PlannedModel
from flopwise.work.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, SEND_RECEIVE, bus_factor

SIZES = (1e4, 1e6, 1e8, 1e10)
H100 = cluster("dgx-h100")


def measured(kind, ranks, latency_ns, bus_bytes_s):
    return [
        CollectiveRow(kind, ranks, int(n), latency_ns + 1e9 * n * bus_factor(kind, ranks) / bus_bytes_s) for n in SIZES
    ]


@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER])
@pytest.mark.parametrize(("ranks", "rate"), [(2, 200e9), (8, 380e9), (16, 150e9), (64, 40e9)])
def test_exchanges_take_what_was_measured(kind, ranks, rate):
    """The same collective over the same ranks, whatever its size: within a domain, and over several."""
    rows = measured(kind, ranks, 300_000, rate)
    mine = with_measured_links(H100, fit(rows))
    found = [exchange_s(kind, row.n_bytes, Group(ranks), mine) * 1e9 for row in rows]
    assert found == pytest.approx([row.ns for row in rows], rel=1e-3)


def test_what_was_not_measured_stays_as_it_is_known():
    inside = with_measured_links(H100, fit(measured(ALL_REDUCE, 8, 30_000, 300e9)))
    between = with_measured_links(H100, fit(measured(ALL_REDUCE, 32, 90_000, 200e9)))
    assert (inside.between_bytes_s, inside.between_start_ns) == (H100.between_bytes_s, None)
    assert (between.inside_bytes_s, between.inside_start_ns) == (H100.inside_bytes_s, None)
    assert inside.sources[-1] == "collectives measured over 8 ranks"


def test_the_largest_number_of_ranks_counts_and_the_median_of_its_kinds():
    rows = measured(ALL_REDUCE, 2, 30_000, 50e9)
    for kind, rate in ((ALL_REDUCE, 390e9), (ALL_GATHER, 330e9), (REDUCE_SCATTER, 310e9)):
        rows += measured(kind, 8, 30_000, rate)
    mine = with_measured_links(H100, fit(rows))
    expected = with_measured_links(H100, fit(measured(ALL_GATHER, 8, 30_000, 330e9)))
    assert mine.inside_bytes_s == pytest.approx(expected.inside_bytes_s, rel=1e-6)


@pytest.mark.parametrize("rows", [[], measured(SEND_RECEIVE, 2, 20_000, 100e9), measured(ALL_REDUCE, 1, 20_000, 100e9)])
def test_a_run_that_says_nothing_of_links_is_refused(rows):
    with pytest.raises(FlopwiseError, match="how fast the links are"):
        with_measured_links(H100, fit(rows))


def test_slower_links_make_a_plan_slower():
    model = PlannedModel(spec=preset("llama3-70b"))
    job = Job(model=model, cluster=H100, layout=Layout(data=8, tensor=8, sequence=True), batch=64, context=8192)
    walls = [
        planned_step(
            msgspec.structs.replace(job, cluster=with_measured_links(H100, fit(measured(ALL_REDUCE, 8, 50_000, rate))))
        ).wall_s
        for rate in (350e9, 200e9, 50e9)
    ]
    assert walls == sorted(walls)
    assert walls[0] < walls[-1]
