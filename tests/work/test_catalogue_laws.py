"""Laws of the catalogue of operations, the classifier of kernels, the table of dtypes and the model of the allocator.

By hand are only the names that a rule is known to be wrong for; everything else is held to torch, or to itself.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from flopwise.capture.watch.op_facts import Call, facts, tensors_in
from flopwise.spec import dtypes
from flopwise.spec.gpu import PEAK_DTYPES
from flopwise.spec.recipe import CHOICES
from flopwise.work import catalogue
from flopwise.work.allocator import MIN_BLOCK, SMALL, CachingAllocator, rounded, unsplit_bytes
from flopwise.work.catalogue import NAMES, operation
from flopwise.work.kernel_class import classify
from flopwise.work.kernel_names import class_of_name
from flopwise.work.op_traffic import TRACED, op_traffic
from flopwise.work.operation import CLASSES
from flopwise.work.recorded import BETWEEN, recorded
from flopwise.work.sized import ATTENTIONS, MATMULS, op_flops
from flopwise.work.tensor import TensorMeta


def _names(text: str) -> list[str]:
    return text.split()


ATEN = {
    name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:4] == "aten"
}
# Of flopwise's kernels, of the flash_attn package, of the shape simulator; parts of others' names.
NOT_ATEN = _names(
    """
    _cumsum _flash_attn_backward _flash_attn_forward adamw add_rms_norm cross_entropy cross_entropy_rows
    flash_backward flash_forward flex_attention fp8_amax fp8_cast fp8_gated_linear fp8_linear fp8_matmul gelu_cuda
    joined_swiglu_gradient infinitely_differentiable_gelu layer_norm_backward
    layer_norm_weights linear_cross_entropy rms_norm_backward rms_norm_cast rms_norm_weights rope rope_pair scale sdpa_cudnn
    sdpa_cudnn_backward sdpa_efficient sdpa_efficient_backward sdpa_flash sdpa_flash_backward sdpa_flex
    sdpa_flex_backward sdpa_triton sdpa_triton_backward swiglu swiglu_cast
    """
)
# An op whose name has the word of another class: no kernel is called so.
MISLEADING = _names(
    """
    _indices _indices_copy _nested_view_from_jagged _nested_view_from_jagged_copy as_strided_scatter ccol_indices
    ccol_indices_copy col_indices col_indices_copy count_nonzero crow_indices crow_indices_copy diagonal_scatter
    empty_permuted empty_quantized indices indices_copy native_dropout_backward row_indices row_indices_copy
    select_scatter slice_scatter tril_indices
    """
)
SHAPES = st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple)
FLOATS = st.sampled_from(["fp64", "fp32", "bf16", "fp16", "fp8"])


# The catalogue.


def test_every_name_has_one_class() -> None:
    names = Counter(name for names in catalogue._CLASSES.values() for name in names.split())
    assert not [name for name, times in names.items() if times > 1]
    assert not [name for name in NAMES if catalogue.known_kind(name) is None]


def test_every_name_is_atens_or_our_own() -> None:
    assert sorted(name for name in NAMES if name not in ATEN and f"{name}_" not in ATEN) == sorted(NOT_ATEN)


@pytest.mark.parametrize("spelling", ["aten::{}", "{}", "aten::{}_"])
def test_whatever_torch_has_is_answered(spelling: str) -> None:
    for name in ATEN:
        op = operation(spelling.format(name))
        assert op.kind in CLASSES, name
        assert callable(op.launches) or op.launches >= 0, name


def test_variants_have_the_class_of_what_they_are_made_from() -> None:
    for name in NAMES - set(NOT_ATEN):
        kind, in_place = operation(name).kind, f"{name}_"
        if in_place in ATEN:
            assert operation(in_place).kind == kind, name
        if f"_foreach_{name}" in ATEN:
            assert operation(f"_foreach_{name}").kind == kind, name


def test_what_launches_nothing_moves_nothing() -> None:
    x = TensorMeta((4, 8), "fp32")
    for name in NAMES:
        op = operation(name)
        if op.launches == 0 and op.moved is not None:
            assert catalogue.work_of_call(op, [x], [x], [x]) == (0, 0, 0, 0), name


def test_every_op_that_a_trace_places_is_in_the_catalogue() -> None:
    for name in (*(f"aten::{name}" for name in TRACED), *MATMULS, *ATTENTIONS):
        assert catalogue.known_kind(name.rpartition("::")[2]) is not None, name


def _grown(shape: tuple[int, ...], by: int) -> tuple[int, ...]:
    return (shape[0] + by, *shape[1:])


@given(shape=SHAPES, dtype=FLOATS, by=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_bytes_grow_with_the_tensors_and_are_never_negative(shape: tuple[int, ...], dtype: str, by: int) -> None:
    small, large = TensorMeta(shape, dtype), TensorMeta(_grown(shape, by), dtype)
    for name in NAMES:
        op = operation(name)
        if op.moved is None:
            less = catalogue.moved_bytes(op, [small, small], [small], [small])
            more = catalogue.moved_bytes(op, [large, large], [large], [large])
            assert 0 <= less[0] <= more[0], name
            assert 0 < less[1] < more[1], name


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_flops_of_products_grow_with_every_side(m: int, n: int, k: int, batch: int, by: int) -> None:
    def flops(name: str, m: int, n: int, k: int, batch: int) -> int:
        lead = (batch,) if name in ("bmm", "baddbmm") else ()
        a, b, c = (TensorMeta((*lead, *pair), "bf16") for pair in ((m, k), (k, n), (m, n)))
        return catalogue.flops(operation(name), [c, a, b] if name in ("addmm", "baddbmm") else [a, b])

    for name in ("mm", "addmm", "bmm", "baddbmm"):
        count = batch if name in ("bmm", "baddbmm") else 1
        assert flops(name, m, n, k, batch) == 2 * count * m * n * k
        assert flops(name, m + by, n, k, batch) > flops(name, m, n, k, batch)


@pytest.mark.parametrize("op", sorted(ATTENTIONS))
def test_attention_that_looks_back_does_two_and_a_half_times_the_work(op: str) -> None:
    name = op.rpartition("::")[2]
    q = TensorMeta((2, 4, 4, 8), "bf16")
    done = catalogue.flops(operation(name), [q] * 4)
    forward = 4 * 2 * 4 * 4 * 4 * 8
    assert done == (forward * 5 // 2 if "backward" in name else forward)


@given(st.lists(st.integers(0, 1 << 24), max_size=300), st.integers(1, 5))
@settings(deadline=None)
def test_more_tensors_are_never_fewer_launches(sizes: list[int], lists: int) -> None:
    name = "aten::_foreach_add_"
    assert operation(name).over_lists
    assert catalogue.launches_over(name, sizes, lists) <= catalogue.launches_over(name, [*sizes, 100], lists)


# The catalogue as the dry run asks it, and as the analysis of a trace does.

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, w: x + w,
    "mul": lambda x, w: x * w[:1],
    "addcmul": lambda x, w: torch.addcmul(x, w, w[:1]),
    "exp": lambda x, w: x.exp(),
    "gelu": lambda x, w: torch.nn.functional.gelu(x),
    "eq": lambda x, w: x == w,
    "where": lambda x, w: torch.where(x > 0, x, w),
    "sum": lambda x, w: x.sum(-1),
    "amax": lambda x, w: x.amax(0),
    "_softmax": lambda x, w: x.softmax(-1),
    "_log_softmax": lambda x, w: x.log_softmax(-1),
    "native_layer_norm": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w[0], w[1]),
    "gather": lambda x, w: x.gather(1, torch.zeros(4, 2, dtype=torch.int64)),
    "index_select": lambda x, w: x.index_select(0, torch.tensor([0, 2, 2])),
    "copy_": lambda x, w: x.copy_(w),
    "fill_": lambda x, w: x.fill_(2.0),
}


class _Calls(TorchDispatchMode):
    """The bytes and FLOPs of every op, as the dry run counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = tensors_in((*args, *(kwargs or {}).values()))
        call = Call(facts(func), args, given, tensors_in(out if isinstance(out, list | tuple) else (out,)))
        self.counted[facts(func).name] = sum(call.moved_bytes)
        return out


def _profiled(tmp_path: Any, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """The profiler's records of ops, with their inputs."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return [{"name": event["name"], **event["args"]} for event in events if event.get("cat") == "cpu_op"]


def _text(event: dict[str, Any]) -> str:
    keys = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
    return BETWEEN.join(json.dumps(event[key]) for key in keys)


@pytest.mark.parametrize("name", CALLS)
def test_the_dry_run_and_a_trace_count_the_same_bytes_of_an_op(name: str, tmp_path: Any) -> None:
    x, w = torch.rand(4, 8), torch.rand(4, 8)
    with _Calls() as calls:
        CALLS[name](x, w)
    events = _profiled(tmp_path, lambda: CALLS[name](x, w))
    found = [recorded(_text(event)) for event in events if event["name"] == f"aten::{name}"]
    assert len(found) == 1
    assert found[0] is not None
    traffic = op_traffic(f"aten::{name}", found[0])
    assert traffic is not None
    assert traffic.n_bytes == calls.counted[name]


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_the_dry_run_and_a_trace_count_the_same_flops_of_an_op(name: str) -> None:
    lead = (3,) if "bmm" in name else ()
    a, b, c = torch.rand(*lead, 4, 8), torch.rand(*lead, 8, 5), torch.rand(*lead, 4, 5)
    args = [c, a, b] if "add" in name else [a, b]
    func = getattr(torch.ops.aten, name).default
    call = Call(facts(func), tuple(args), args, [c])
    assert catalogue.flops(facts(func).op, call.args) == op_flops(f"aten::{name}", str([list(t.shape) for t in args]))


# The classifier of kernels.


def test_a_kernel_called_as_an_op_has_the_ops_class() -> None:
    names = [name for name in ATEN if catalogue.known_kind(name) and class_of_name(name)]
    assert sorted(n for n in names if class_of_name(n) != catalogue.known_kind(n)) == MISLEADING


def test_a_kernel_whose_name_says_nothing_has_the_class_of_its_op() -> None:
    for name in NAMES:
        assert classify("k", f"aten::{name}") == operation(name).kind


@given(st.text(max_size=80), st.text(max_size=40), st.sampled_from(["", "forward", "backward", "optimizer"]))
def test_every_kernel_has_a_class(name: str, op: str, phase: str) -> None:
    assert classify(name, op, phase) in CLASSES


# Dtypes.

TORCH_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
WITHOUT_A_ROW = re.compile(r"q.+|bits.+|u?int[1-7]")  # quantized, opaque, or parts of bytes


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_of_torch_is_in_the_table(dtype: torch.dtype) -> None:
    row, name = dtypes.from_torch(dtype), str(dtype).removeprefix("torch.")
    if row is None:
        assert WITHOUT_A_ROW.fullmatch(name)
        return
    assert (row.n_bytes, row.floating, getattr(torch, row.torch)) == (dtype.itemsize, dtype.is_floating_point, dtype)


@pytest.mark.parametrize("row", dtypes.DTYPES.values(), ids=lambda row: row.name)
def test_the_profiler_spells_dtypes_as_the_table_has_them(row: dtypes.Dtype, tmp_path: Any) -> None:
    dtype = getattr(torch, row.torch)
    if "float4" in row.torch:
        pytest.skip("torch has no conversion to it")
    events = _profiled(tmp_path, lambda: torch.zeros(2, dtype=dtype).clone().new_empty(2, dtype=dtype))
    clone = next(event for event in events if event["name"] == "aten::clone")
    spelled = dtypes.from_kineto(clone["Input type"][0])
    assert spelled == row if row.kineto else spelled is None
    made = next(event for event in events if event["name"] == "aten::new_empty")
    assert dtypes.from_code(made["Concrete Inputs"][2]) == row


def test_names_spellings_and_codes_are_each_one_rows() -> None:
    rows = dtypes.DTYPES.values()
    spellings = [spelling for row in rows for spelling in row.kineto]
    assert len({row.torch for row in rows}) == len({row.code for row in rows}) == len(rows)
    assert len(set(spellings)) == len(spellings)


def test_every_precision_has_a_dtype() -> None:
    for precision in (*CHOICES["precision"], *PEAK_DTYPES):
        assert dtypes.named(precision).floating
    assert all(dtypes.item_bytes(name) for name in PEAK_DTYPES)


# The allocator.


@given(st.lists(st.integers(0, 1 << 26), max_size=40))
@settings(deadline=None)
def test_the_allocator_holds_what_was_asked_for_and_gets_it_back(sizes: list[int]) -> None:
    gpu = CachingAllocator()
    blocks = [gpu.allocate(size) for size in sizes]
    asked = sum(map(rounded, sizes))
    assert asked <= gpu.allocated_bytes <= gpu.reserved_bytes
    assert gpu.allocated_bytes - asked == unsplit_bytes(sizes) <= SMALL * len(sizes)
    reserved = gpu.reserved_bytes
    for block in blocks:
        gpu.free(block)
    assert (gpu.allocated_bytes, gpu.reserved_bytes) == (0, reserved)


@given(st.integers(0, 1 << 40))
def test_rounding_is_up_by_less_than_a_block(n_bytes: int) -> None:
    assert 0 <= rounded(n_bytes) - n_bytes < MIN_BLOCK
    assert rounded(rounded(n_bytes)) == rounded(n_bytes)
