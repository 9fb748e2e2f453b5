"""Laws of the roofline: no operation beats a limit, the two queues are never both idle, the parts are the whole."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.predict.constants import OVERLAP_SHARE
from flopwise.predict.op_time import BANDWIDTH, COMPUTE, LAUNCH, curve_name, matmul_ns, op_time
from flopwise.predict.step_time import host_ns, time_of
from flopwise.records.ceilings import Ceilings, Curve, HostCost, Matmul, Tile
from flopwise.work.operation import ATTENTION, CLASSES, ELEMENTWISE, MATMUL, NORMALISATION, PHASES, OpWork

PROCESSORS, PER_PROCESSOR, BANDWIDTH_BYTES = 100, 8e12, 4e12


def ceilings(**changes):
    tiles = tuple(Tile(m=m, n=n, start_ns=1000.0, flops_per_s=PER_PROCESSOR) for m, n in ((64, 64), (128, 256)))
    product = Matmul(peak_flops=PROCESSORS * PER_PROCESSOR, tiles=tiles, join_ns=2000.0)
    given = {
        "gpu": "toy",
        "how": "specified",
        "processors": PROCESSORS,
        "bandwidth_bytes_per_s": BANDWIDTH_BYTES,
        "matmul": {"fp32": product},
        "memory": {"elementwise": Curve(amount=(8e6, 1e9), ns=(2000.0, 1e18 / BANDWIDTH_BYTES))},
        "attention": {"fp32": Curve(amount=(1e6, 1e12), ns=(2000.0, 2.5e6))},
        "attention_backward": {"fp32": Curve(amount=(1e6, 1e12), ns=(2000.0, 3e6))},
        "host": {"forward": HostCost(op_ns=5000.0, view_ns=1000.0, kernel_ns=3000.0)},
        "latency_ns": 1000.0,
        "graph_gap_ns": 500.0,
    }
    return Ceilings(**(given | changes))


def elementwise(n_bytes, phase="forward", kernels=1):
    return OpWork(
        op="add", module="", phase=phase, kind=ELEMENTWISE, dtype="fp32", read_bytes=n_bytes // 2,
        write_bytes=n_bytes - n_bytes // 2, kernels=kernels,
    )  # fmt: skip


def product(m, n, k, batch=1):
    shapes = ((batch, m, k), (batch, k, n))
    moved = 4 * batch * (m * k + k * n)
    return OpWork(
        op="bmm", module="", phase="forward", kind=MATMUL, dtype="fp32", flops=2 * batch * m * n * k, read_bytes=moved,
        write_bytes=4 * batch * m * n, shapes=shapes,
    )  # fmt: skip


sizes = st.integers(1, 5000)
ops = st.lists(
    st.builds(
        lambda n, phase, kernels: elementwise(n, phase, kernels),
        st.integers(0, 10**9),
        st.sampled_from(PHASES),
        st.integers(0, 3),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 64))
def test_no_product_beats_the_peak_or_the_bandwidth(m, n, k, batch):
    op, limits = product(m, n, k, batch), ceilings()
    ns = op_time(op, limits).ns
    assert ns >= 1e9 * op.flops / limits.matmul["fp32"].peak_flops
    assert ns >= 1e9 * (op.read_bytes + op.write_bytes) / BANDWIDTH_BYTES * 0.999


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, sizes)
def test_a_larger_product_never_takes_less(m, n, k):
    limits = ceilings().matmul["fp32"]
    one = matmul_ns(1, m, n, k, limits, PROCESSORS)
    assert all(
        matmul_ns(1, *larger, limits, PROCESSORS) >= one for larger in ((m + 1, n, k), (m, n + 1, k), (m, n, k + 1))
    )


@settings(max_examples=200, deadline=None)
@given(ops, st.booleans())
def test_the_parts_are_the_whole_and_the_step_is_no_shorter_than_either_queue(step, graph):
    limits = ceilings()
    predicted = time_of(step, limits, graph=graph)
    assert math.isclose(sum(p.wall_ns for p in predicted.phases), predicted.wall_ns)
    assert math.isclose(sum(p.gpu_ns for p in predicted.phases), predicted.gpu_ns)
    assert math.isclose(sum(predicted.gpu_ns_by_kind.values()), predicted.gpu_ns)
    assert math.isclose(sum(predicted.gpu_ns_by_bound.values()), predicted.gpu_ns)
    assert predicted.wall_ns >= max(predicted.gpu_ns, predicted.host_ns) * (1 - 1e-12)
    launched = sum(op.kernels > 0 for op in step)
    serial = predicted.gpu_ns + predicted.host_ns + launched * limits.latency_ns
    assert predicted.wall_ns <= serial + limits.graph_gap_ns * sum(op.kernels for op in step) * graph + 1e-6


def test_many_small_kernels_are_bound_by_their_launches_and_a_graph_frees_them():
    step = [elementwise(1000) for _ in range(100)]
    eager, graph = time_of(step, ceilings()), time_of(step, ceilings(), graph=True)
    assert (eager.bound, eager.host_ns) == (LAUNCH, 100 * 5000.0)
    assert eager.wall_ns == 100 * 5000.0 + 1000.0 + 2000.0  # the last one's latency and time
    assert (graph.wall_ns, graph.host_ns) == (100 * 2500.0, 0.0)


def test_large_kernels_hide_their_launches():
    step = [elementwise(10**9) for _ in range(10)]
    predicted = time_of(step, ceilings())
    assert predicted.bound == BANDWIDTH
    assert predicted.wall_ns == pytest.approx(5000 + 1000 + 10 * 250_000)


def test_updates_beside_the_backward_pass_hide_up_to_its_compute_bound_time():
    backward = msgspec.structs.replace(product(4096, 4096, 4096), phase="backward")
    moving, updates = elementwise(10**9, "backward"), [elementwise(10**9, "optimizer")] * 2
    step = [backward, moving, *updates]
    alone, beside = time_of(step, ceilings(), graph=True), time_of(step, ceilings(), graph=True, overlap=True)
    computing, updating = (op_time(op, ceilings(), graph=True).ns for op in (backward, updates[0]))
    hidden = OVERLAP_SHARE * min(2 * updating, computing)
    assert alone.wall_ns - beside.wall_ns == pytest.approx(hidden)
    assert sum(p.wall_ns for p in beside.phases) == pytest.approx(beside.wall_ns)
    assert time_of([moving, *updates], ceilings(), overlap=True) == time_of([moving, *updates], ceilings())


def test_every_update_within_the_backward_pass_costs_the_host_its_start():
    begin = {"optimizer": HostCost(op_ns=5000.0, view_ns=0.0, kernel_ns=0.0, start_ns=70_000.0)}
    limits = ceilings(host=ceilings().host | begin)
    one, other = elementwise(1000, "backward"), elementwise(1000, "optimizer")
    together, apart = time_of([one, one, other, other], limits), time_of([one, other, one, other], limits)
    assert apart.host_ns - together.host_ns == pytest.approx(70_000)
    assert sum(p.host_ns for p in apart.phases) == pytest.approx(apart.host_ns)


def test_what_bounds_an_operation():
    limits = ceilings()
    assert op_time(product(8192, 8192, 8192), limits).bound == COMPUTE
    assert op_time(product(8192, 1, 8192), limits).bound == BANDWIDTH
    assert op_time(elementwise(100), limits).bound == LAUNCH
    attention = OpWork(op="sdpa", module="", phase="forward", kind=ATTENTION, dtype="fp32", flops=10**12)
    forward, backward = (
        op_time(OpWork(**(as_dict(attention) | {"phase": phase})), limits) for phase in ("forward", "backward")
    )
    assert (forward.ns, backward.ns) == (pytest.approx(2.5e6), pytest.approx(3e6))


def as_dict(op):
    return {name: getattr(op, name) for name in op.__struct_fields__}


def test_attention_goes_by_its_backends_curve_where_there_is_one():
    def curve(ns):
        return Curve(amount=(1e6, 1e12), ns=(2000.0, ns))

    limits = ceilings(attention={"fp32": curve(8e6), "bf16": curve(2e6), "bf16, flash": curve(3e6)})

    def taken(op, dtype="bf16"):
        return op_time(OpWork(op=op, module="", phase="forward", kind=ATTENTION, dtype=dtype, flops=10**12), limits).ns

    assert [taken(name) for name in ("sdpa_flash", "sdpa_cudnn", "sdpa_triton")] == [3e6, 2e6, 2e6]
    assert taken("_scaled_dot_product_flash_attention") == 3e6
    assert taken("flopwise::flash_forward") == 2e6  # ours is not FlashAttention-2
    assert (taken("sdpa_flash", "fp16"), taken("sdpa_flash", "fp32")) == (3e6, 8e6)


def test_a_view_costs_the_host_alone():
    view = elementwise(0, kernels=0)
    predicted = time_of([view] * 5, ceilings())
    assert (predicted.gpu_ns, predicted.host_ns, predicted.wall_ns) == (0.0, 5000.0, 5000.0)
    assert host_ns(elementwise(8, kernels=3), ceilings().host["forward"]) == 5000.0 + 2 * 3000.0


def test_every_class_has_a_time():
    assert all(
        op_time(OpWork(op="x", module="", phase="forward", kind=kind, dtype="bf16", read_bytes=10), ceilings()).ns > 0
        for kind in CLASSES
    )


@pytest.mark.parametrize(
    "change",
    [
        {"latency_ns": 1e308},
        {"latency_ns": float("nan")},
        {"bandwidth_bytes_per_s": 1e-300},
        {"host": {"forward": HostCost(op_ns=-5.0, view_ns=0.0, kernel_ns=0.0)}},
        {"host": {"forward": HostCost(op_ns=1e308, view_ns=0.0, kernel_ns=0.0)}},
    ],
)
def test_numbers_that_no_machine_has_are_refused(change):
    with pytest.raises(ValueError, match=r"machine|launch"):
        ceilings(**change)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("flopwise::rms_norm", NORMALISATION, "normalisation, rms, half"),
        ("flopwise::rope_pair", ELEMENTWISE, "elementwise, half"),
        ("flopwise::swiglu", ELEMENTWISE, "elementwise, half"),  # of two halves of one tensor
        ("mul", ELEMENTWISE, "elementwise, strided, mixed"),
        ("rms_norm_backward", NORMALISATION, "normalisation, rms, half"),
        ("rms_norm_weights", NORMALISATION, "normalisation, half"),
    ],
)
def test_our_kernels_read_rows_in_order_whatever_lies_between_them(name, kind, expected):
    op = OpWork(op=name, module="", phase="forward", kind=kind, dtype="bf16", strided=True, mixed=True)
    assert curve_name(op) == expected
