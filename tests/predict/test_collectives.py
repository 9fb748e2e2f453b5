"""A collective's time is a latency and a bandwidth: found again where they were planted, known where NCCL states them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.predict.collectives import (
    NETWORK,
    NVLINK,
    PCIE,
    CollectiveRow,
    CollectiveTime,
    collective_time,
    fit,
    specified,
)
from flopwise.work.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SEND_RECEIVE,
    bus_factor,
)

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND_RECEIVE)
SIZES = [2**n for n in range(10, 31, 2)]  # 1 KiB to 1 GiB
# An all-reduce over 4 hosts of 8 GPUs: KiB and GB/s of bus bandwidth, as stas00/ml-engineering, network/benchmarks, prints it.
PUBLISHED = {
    32: 0.92, 64: 1.61, 128: 3.05, 256: 5.18, 512: 9.17, 1024: 17.13, 2048: 23.79, 4096: 40.30, 8192: 68.62,
    16384: 93.93, 32768: 98.34, 65536: 84.90, 131072: 88.23, 262144: 91.01, 524288: 92.95, 1048576: 94.15,
}  # fmt: skip


def planted(kind: str, ranks: int, latency_ns: float, bytes_s: float, wrong: float = 0.0) -> list[CollectiveRow]:
    """Rows of that latency and bus bandwidth, every second one `wrong` too long and the others too short."""
    return [
        CollectiveRow(
            kind, ranks, size, (latency_ns + size * bus_factor(kind, ranks) / bytes_s * 1e9) * (1 + wrong * (-1) ** n)
        )
        for n, size in enumerate(SIZES)
    ]


@given(
    st.sampled_from(KINDS),
    st.integers(2, 1024),
    st.floats(1e3, 1e6),
    st.floats(1e8, 1e12),
    st.sampled_from([0.0, 0.02, 0.1]),
)
def test_what_was_planted_is_found_and_every_size_is_met_as_well_as_the_rows_allow(kind, ranks, latency, rate, wrong):
    (found,) = fit(planted(kind, ranks, latency, rate, wrong))
    assert (found.kind, found.ranks, found.how) == (kind, ranks, "measured")
    for row in planted(kind, ranks, latency, rate):
        assert found.ns(row.n_bytes) == pytest.approx(row.ns, rel=1e-6 + 2 * wrong)
    assert found.miss == pytest.approx(wrong, abs=wrong + 1e-6)


def test_one_size_that_is_off_does_not_decide_the_others():
    rows = planted(ALL_REDUCE, 8, 20_000, 300e9)
    rows[-1] = rows[-1]._replace(ns=rows[-1].ns * 1.3)
    (found,) = fit(rows)
    assert found.latency_ns == pytest.approx(20_000, rel=0.05)


def test_each_kind_and_number_of_ranks_has_a_line_of_its_own():
    rows = [row for n in (2, 4) for kind in KINDS for row in planted(kind, n, 1000 * n, 1e9 * len(kind))]
    found = {(one.kind, one.ranks): one for one in fit(reversed(rows))}
    assert len(found) == 2 * len(KINDS)
    for (kind, ranks), one in found.items():
        assert one.latency_ns == pytest.approx(1000 * ranks)
        assert one.bus_bytes_s == pytest.approx(1e9 * len(kind))


def test_neither_number_is_below_zero():
    (rising,) = fit([CollectiveRow(ALL_GATHER, 2, 1000, 10.0), CollectiveRow(ALL_GATHER, 2, 2000, 40.0)])
    assert rising.latency_ns == 0
    (falling,) = fit([CollectiveRow(ALL_GATHER, 2, 1000, 40.0), CollectiveRow(ALL_GATHER, 2, 2000, 10.0)])
    assert falling.bus_bytes_s is None
    assert 10 < falling.ns(1e9) < 40


@pytest.mark.parametrize(
    "rows",
    [
        [CollectiveRow(ALL_REDUCE, 2, 1000, 10.0)] * 3,
        [CollectiveRow(ALL_REDUCE, 2, 1000, 10.0), CollectiveRow(ALL_REDUCE, 2, 2000, 0.0)],
        [CollectiveRow(ALL_REDUCE, 2, 1000, 10.0), CollectiveRow(ALL_REDUCE, 2, 2000, math.nan)],
        [CollectiveRow(ALL_REDUCE, 2, 1000, 10.0), CollectiveRow(ALL_REDUCE, 2, 0, 10.0)],
    ],
)
def test_rows_that_give_no_line_are_refused(rows):
    with pytest.raises(FlopwiseError, match="all-reduce over 2 ranks"):
        fit(rows)


def test_a_published_sweep_over_five_orders_of_magnitude_is_met():
    factor = bus_factor(ALL_REDUCE, 32)
    rows = [CollectiveRow(ALL_REDUCE, 32, 1024 * kib, 1024 * kib * factor / rate) for kib, rate in PUBLISHED.items()]
    (found,) = fit(rows)
    assert found.miss < 0.1
    assert max(abs(found.ns(row.n_bytes) / row.ns - 1) for row in rows) < 0.35
    assert found.bus_bytes_s == pytest.approx(92e9, rel=0.1)


@pytest.mark.parametrize(
    ("link", "stated", "reached"), [(NVLINK, 300e9, 240e9), (PCIE, 15.75e9, 12e9), (NETWORK, 12.5e9, 12e9)]
)
def test_large_messages_over_a_link_reach_what_nccl_expects_of_it(link, stated, reached):
    for kind in KINDS:
        found = specified(kind, 8, link, stated)
        assert found.how == "specified"
        assert found.bus_bytes_s == pytest.approx(reached, rel=0.01)
        size = 2**36
        assert size * bus_factor(kind, 8) / found.ns(size) * 1e9 == pytest.approx(reached, rel=0.01)


def test_short_messages_take_the_protocol_of_short_messages_and_never_a_longer_time_than_another():
    found = specified(ALL_REDUCE, 8, NVLINK, 450e9)
    low, middle, simple = found.lines
    assert found.ns(1024) == pytest.approx(low.at(1024 * 1.75))
    assert found.ns(2**23) == pytest.approx(middle.at(2**23 * 1.75))
    assert found.ns(2**30) == pytest.approx(simple.at(2**30 * 1.75))
    times = [found.ns(size) for size in SIZES]
    assert times == sorted(times)
    assert len(specified(ALL_REDUCE, 8, PCIE, 31.5e9).lines) == 2  # LL128 needs NVLink


def test_other_numbers_of_ranks_follow_from_the_nearest():
    measured = fit(
        [*planted(ALL_REDUCE, 2, 9_000, 1e11), *planted(ALL_REDUCE, 8, 21_000, 2e11), *planted(ALL_GATHER, 4, 1, 1e9)]
    )
    two, eight = (collective_time(measured, ALL_REDUCE, ranks) for ranks in (2, 8))
    assert (two.latency_ns, eight.latency_ns) == (pytest.approx(9_000), pytest.approx(21_000))
    sixteen = collective_time(measured, ALL_REDUCE, 16)
    assert sixteen.ranks == 16
    assert sixteen.bus_bytes_s == eight.bus_bytes_s
    assert sixteen.latency_ns > eight.latency_ns
    assert collective_time(measured, ALL_REDUCE, 3).bus_bytes_s == two.bus_bytes_s
    with pytest.raises(FlopwiseError, match="all-to-all was not measured"):
        collective_time(measured, ALL_TO_ALL, 2)


def test_a_rank_alone_has_a_time_too():
    rows = [CollectiveRow(ALL_REDUCE, 1, size, 3000 + size / 1000) for size in SIZES]
    (found,) = fit(rows)
    assert isinstance(found, CollectiveTime)
    assert found.bus_bytes_s == pytest.approx(1e12)
