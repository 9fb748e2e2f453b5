"""What the cache has kept of a step's tensors."""

from flopwise.ceilings import COLD, Curve
from flopwise.cost.datasheet import from_datasheet
from flopwise.cost.roofline import op_times
from flopwise.cost.warmth import cold_bytes
from flopwise.spec.gpu import gpu
from flopwise.work import ELEMENTWISE, OpWork

MB = 10**6
H200 = from_datasheet(gpu("h200"))


def moving(read: int, written: int, n_bytes: int = 10 * MB) -> OpWork:
    return OpWork(
        op="mul", module="", phase="forward", kind=ELEMENTWISE, dtype="fp32", read_bytes=n_bytes, write_bytes=n_bytes,
        reads=((read, n_bytes),), writes=((written, n_bytes),),
    )  # fmt: skip


def test_what_was_just_written_is_warm_and_what_was_long_ago_is_not():
    ops = [moving(1, 2), moving(2, 3), moving(3, 4), moving(2, 5)]
    assert cold_bytes(ops, 35.0 * MB) == [10.0 * MB, 0.0, 0.0, 10.0 * MB]
    assert cold_bytes(ops, 1e12) == [10.0 * MB, 0.0, 0.0, 0.0]
    assert cold_bytes(ops, 0.0) == [0.0] * 4


def test_a_cold_read_takes_longer_until_it_is_larger_than_the_cache():
    first, again = op_times([moving(1, 2), moving(1, 3)], H200)
    assert first.ns > again.ns > 0
    assert H200.cold_ns(1e10) < 0.02 * H200.curve(ELEMENTWISE).at(2e10)
    assert 1e7 < H200.cached_bytes < 1e8


def test_a_measured_curve_of_cold_reads_is_used():
    warm = H200.memory[ELEMENTWISE]
    cold = Curve(amount=warm.amount[6:], ns=tuple(ns + 1000.0 for ns in warm.ns[6:]))
    limits = type(H200)(
        **{n: getattr(H200, n) for n in H200.__struct_fields__} | {"memory": H200.memory | {COLD: cold}}
    )
    assert round(limits.cold_ns(1e8)) == 1000
    assert limits.cold_ns(1e3) < 10
