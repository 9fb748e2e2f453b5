"""Ceilings from probes: a tile model that made the times is found again; curves pass through what was measured."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from flopwise.errors import FlopwiseError
from flopwise.predict.calibration import _compiled, _host, ceilings, curve, matmul, tiles
from flopwise.predict.op_time import matmul_ns
from flopwise.predict.shapes.step import account_step
from flopwise.predict.step_time import time_of
from flopwise.records.ceilings import Matmul, Probe
from flopwise.spec.workload import workload

PROCESSORS = 132
TRUE = Matmul(peak_flops=8e14, tiles=tiles(6.5e12, 3000.0, 1200.0, 0.1), join_ns=4000.0)
GRID = [(1, m, n, k) for m in (512, 2048, 8192) for n in (768, 3072, 10000) for k in (256, 1024, 4096)]


def probes(shapes, noise, seed=0):
    rng = np.random.default_rng(seed)
    for shape in shapes:
        batch, m, n, k = shape
        ns = matmul_ns(*shape, TRUE, PROCESSORS) * float(np.exp(rng.normal(0, noise)))
        yield Probe(what="matmul", dtype="bf16", amount=2.0 * batch * m * n * k, shape=shape, ns=ns)


@pytest.mark.parametrize(("noise", "allowed"), [(0.0, 0.03), (0.02, 0.05)])
def test_the_model_behind_the_times_is_found_well_enough_for_other_shapes(noise, allowed):
    found = matmul(list(probes(GRID, noise)), PROCESSORS)
    others = [(1, 1024, 1600, 6400), (1, 4096, 5120, 1280), (1, 1280, 5120, 2048), (1, 6400, 1600, 4096)]
    ratios = [matmul_ns(*s, found, PROCESSORS) / matmul_ns(*s, TRUE, PROCESSORS) for s in others]
    assert np.median(np.abs(np.log(ratios))) < allowed


def test_a_curve_passes_through_its_probes_and_rises():
    given = [Probe(what="softmax", amount=a, ns=ns) for a, ns in ((1e5, 2e3), (1e6, 2.1e3), (1e8, 4e4))]
    made = curve(given)
    assert [made.at(p.amount) for p in given] == pytest.approx([p.ns for p in given])
    grid = [made.at(a) for a in np.geomspace(1e3, 1e10, 200)]
    assert all(b >= a for a, b in pairwise(grid))
    assert made.at(1e9) == pytest.approx(4e5)


@cache
def machine(asynchronous=True):
    """Probes of a machine of which everything is known."""
    given = [Probe(what=w, amount=a, ns=2e3 + a / 4) for w in ("elementwise", "softmax") for a in (1e4, 1e6, 1e9)]
    given += [Probe(what=w, dtype="fp32", amount=1e9, ns=1e5) for w in ("attention", "attention backward")]
    given += list(probes(GRID, 0.0))
    given += [
        Probe(what="matmul", dtype="fp32", amount=p.amount, shape=p.shape, ns=8 * p.ns) for p in probes(GRID, 0.0)
    ]
    given += [Probe(what=w, ns=ns) for w, ns in (("latency", 3e3), ("graph gap", 5e2))]
    given += [Probe(what="host:view", ns=1e3), Probe(what="host:kernel", ns=4e3)]
    given += [
        Probe(what=f"host:{phase}", shape=(100, 50, 10, 0), ns=100 * op_ns + 50 * 1e3 + 10 * 4e3)
        for phase, op_ns in (("forward", 9e3), ("backward", 12e3), ("optimizer", 8e3))
    ]
    given += [Probe(what="host:lists", shape=(10, 0, 0, 400), ns=10 * 8e3 + 400 * 2e3)]
    given += [Probe(what="host:compiled", ns=3e5)]
    return ceilings(given, gpu="toy", processors=PROCESSORS, versions={}, asynchronous=asynchronous)


def test_ceilings_hold_what_the_probes_said():
    found = machine()
    assert (found.how, found.latency_ns, found.graph_gap_ns) == ("measured", 3e3, 5e2)
    assert {phase: cost.op_ns for phase, cost in found.host.items()} == pytest.approx(
        {"forward": 9e3, "backward": 12e3, "optimizer": 8e3}
    )
    assert (found.host["optimizer"].listed_ns, found.compiled_call_ns) == (pytest.approx(2e3), 3e5)
    assert found.bandwidth_bytes_per_s == pytest.approx(4e9, rel=1e-3)
    assert found.curve("softmax").at(1e9) == pytest.approx(2e3 + 1e9 / 4)
    assert found.bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.01)
    assert set(found.matmul) == {"fp32", "bf16"}


def known_host(ops=9e3, cast=5e3, start=2e5, counts=((90, 30), (350, 115), (60, 0), (230, 0))):
    """Steps of a host that takes so long for an operation, a cast, and a phase at all."""
    given = [Probe(what="host:view", ns=1e3), Probe(what="host:kernel", ns=4e3), Probe(what="host:start", ns=7e4)]
    for n, casts in counts:
        ns = (n - casts) * ops + casts * cast + start + 10 * 4e3
        given.append(Probe(what="host:forward", shape=(n, 0, 10, 0, casts), ns=ns))
        given.append(Probe(what="host:backward", shape=(n, 0, 10, 0, casts), ns=ns + 7e4))
        given.append(Probe(what="host:optimizer", shape=(11 * n, 0, 0, 0, 0), ns=11 * n * 6e3 + start))
        given.append(Probe(what="host:lists", shape=(8, 0, 0, 13 * n, 0), ns=8 * 6e3 + 13 * n * 2e3 + 3e5))
    return given


def test_steps_deep_and_shallow_tell_operations_casts_and_the_start_apart():
    costs = _host(known_host())
    for phase in ("forward", "backward"):
        found = costs[phase]
        assert (found.op_ns, found.cast_ns, found.start_ns) == pytest.approx((9e3, 5e3, 2e5))
    lists = costs["optimizer"]
    assert (lists.op_ns, lists.cast_ns) == (pytest.approx(6e3), None)
    assert (lists.listed_ns, lists.start_ns) == pytest.approx((2e3, 3e5))


def test_of_a_phase_without_a_start_none_is_found():
    found = _host([probe for probe in known_host(start=0.0) if probe.what != "host:lists"])["forward"]
    assert (found.op_ns, found.start_ns) == (pytest.approx(9e3), pytest.approx(0.0, abs=1.0))


def test_a_compiled_call_grows_with_its_kernels_and_what_it_is_handed():
    given = [
        Probe(what=f"host:compiled {phase}", shape=(kernels, 0, 0, handed, 0), ns=5e4 + 8e3 * kernels + 1e3 * handed)
        for phase in ("forward", "backward")
        for kernels, handed in ((8, 5), (48, 25), (48, 2))
    ]
    found = _compiled(given)
    for cost in found.values():
        assert (cost.op_ns, cost.listed_ns, cost.start_ns) == pytest.approx((8e3, 1e3, 5e4))
    assert _compiled(given[:2]) == {}  # too few to tell


def test_noise_does_not_make_compiled_kernels_free_and_tensors_dear():
    """As one H200 was calibrated: 452, 1187 and 782 µs for 5, 35 and 24 kernels that are handed 5, 25 and 14 tensors."""
    given = [
        Probe(what=f"host:compiled {phase}", shape=(kernels, 0, 0, handed, 0), ns=ns)
        for phase in ("forward", "backward")
        for kernels, handed, ns in ((5, 5, 452e3), (35, 25, 1187e3), (24, 14, 782e3))
    ]
    for cost in _compiled(given).values():
        assert 0 < cost.listed_ns <= cost.op_ns / 2
        assert 10e3 < cost.op_ns < 25e3


def test_a_step_is_predicted_from_them():
    step = account_step(workload("tiny", phase="train")).ops
    launched, at_once = time_of(step, machine()), time_of(step, machine(asynchronous=False))
    assert launched.host_ns > 0 == at_once.host_ns
    assert launched.wall_ns > at_once.wall_ns > 0


def test_probes_that_tell_too_little_are_one_line():
    with pytest.raises(FlopwiseError, match="too few"):
        ceilings([], gpu="toy", processors=1, versions={})


def test_many_products_at_once_take_what_each_takes_alone():
    """The fit and the prediction are the same formula."""
    from flopwise.predict.calibration import _times, _waves_and_work

    shapes = np.array([*GRID, (48, 512, 64, 512), (1, 1, 1, 1)], dtype=float)
    numbers = np.array([6.5e12, 3000.0, 1200.0, 0.1, 4000.0])
    at_once = _times(*_waves_and_work(shapes, PROCESSORS), numbers)
    alone = [matmul_ns(*(int(size) for size in shape), TRUE, PROCESSORS) for shape in shapes]
    assert at_once == pytest.approx(alone)
