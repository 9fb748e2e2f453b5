"""What the cache has kept of a step's tensors."""

import msgspec
import pytest

from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.op_time import cold_bytes, op_times
from flopwise.records.ceilings import COLD, Curve
from flopwise.spec.gpu import gpu
from flopwise.work.operation import ELEMENTWISE, OpWork

MB = 10**6
WARM = Curve(amount=(1e4, 1e6, 8e6, 32e6, 64e6, 1e9), ns=(2e3, 2.1e3, 3e3, 6.5e3, 18e3, 250e3))  # 32 MB lie in a cache
CACHED = msgspec.structs.replace(from_datasheet(gpu("h200")), memory={ELEMENTWISE: WARM})


def moving(read: int, written: int, n_bytes: int = 10 * MB) -> OpWork:
    return OpWork(
        op="mul", module="", phase="forward", kind=ELEMENTWISE, dtype="fp32", read_bytes=n_bytes, write_bytes=n_bytes,
        reads=((read, n_bytes),), writes=((written, n_bytes),),
    )  # fmt: skip


def test_what_was_just_written_is_warm_and_what_was_long_ago_is_not():
    ops = [moving(1, 2), moving(2, 3), moving(3, 4), moving(2, 5)]
    assert cold_bytes(ops, 25.0 * MB) == [10.0 * MB, 0.0, 0.0, 10.0 * MB]
    assert cold_bytes(ops, 1e12) == [10.0 * MB, 0.0, 0.0, 0.0]
    assert cold_bytes(ops, 0.0) == [0.0] * 4


def test_a_cold_read_takes_longer_until_it_is_larger_than_the_cache():
    first, again = op_times([moving(1, 2), moving(1, 3)], CACHED)
    assert first.ns > again.ns > 0
    assert CACHED.cold_ns(1e10) < 0.02 * WARM.at(2e10)
    assert CACHED.cached_bytes == 32e6


def test_a_measured_curve_of_cold_reads_is_used():
    cold = Curve(amount=(1e6, 1e9), ns=(WARM.at(1e6) + 1000.0, WARM.at(1e9) + 1000.0))
    limits = msgspec.structs.replace(CACHED, memory=CACHED.memory | {COLD: cold})
    assert limits.cold_ns(5e8) == pytest.approx(1000.0)
    assert limits.cold_ns(1e3) < 10
