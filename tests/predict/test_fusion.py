"""Laws of fusion: nothing is computed twice or lost, no kernel waits for itself, and no more bytes are moved than before."""

import re
from itertools import count

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.predict.fusion import NEVER_FUSED, block_of, fuse, whole_model
from flopwise.predict.op_time import curve_name
from flopwise.predict.shapes.step import account_step
from flopwise.spec.workload import workload
from flopwise.work.operation import COPY, ELEMENTWISE, MATMUL, NORMALISATION, REDUCTION, OpWork

SIZE = 4096


def op(reads, writes, kind=ELEMENTWISE, name="add", phase="forward", elements=SIZE, module=""):
    return OpWork(
        op=name, module=module, phase=phase, kind=kind, dtype="fp32", flops=elements, read_bytes=4 * SIZE * len(reads),
        write_bytes=4 * SIZE * len(writes), reads=tuple((t, 4 * SIZE) for t in reads),
        writes=tuple((t, 4 * SIZE) for t in writes), shapes=((elements,),),
    )  # fmt: skip


def halved(one):
    """Reading half as many bytes as it writes: a cast from bf16."""
    return msgspec.structs.replace(one, read_bytes=one.read_bytes // 2, reads=tuple((t, n // 2) for t, n in one.reads))


def shrunk(one):
    """Writing half as many bytes as it reads: a cast to bf16."""
    writes = tuple((t, n // 2) for t, n in one.writes)
    return msgspec.structs.replace(one, write_bytes=one.write_bytes // 2, writes=writes)


def test_a_chain_becomes_one_kernel_that_reads_and_writes_its_ends():
    (one,) = fuse([op([0], [1], name="exp"), op([1], [2], name="neg"), op([2], [3], name="add")])
    assert (one.op, one.reads, one.writes) == ("fused exp neg add", ((0, 4 * SIZE),), ((3, 4 * SIZE),))
    assert (one.read_bytes, one.write_bytes, one.flops, one.kernels) == (4 * SIZE, 4 * SIZE, 3 * SIZE, 1)


def test_what_is_read_later_is_written():
    """A residual stream: the sum goes into the norm, over the matmul, and beside it."""
    step = [
        op([0, 1], [2]),
        op([2], [3], name="norm"),
        op([3, 9], [4], kind=MATMUL, name="mm"),
        op([2, 4], [5], name="add"),
    ]
    first, product, last = fuse(step)
    assert (first.op, product.op, last.op) == ("fused add norm", "mm", "fused add")
    assert {t for t, _ in first.writes} == {2, 3}
    assert {t for t, _ in last.reads} == {2, 4}


def test_a_cast_is_made_where_its_only_reader_reads_it():
    """Gradients of two products meet: one comes later, and the other's cast waits for it, whatever lies in between."""
    cast = {"kind": COPY, "name": "to"}
    step = [
        op([0, 8], [1], kind=MATMUL, name="mm"),
        halved(op([1], [2], **cast)),
        op([0, 9], [3], kind=MATMUL, name="mm"),
        op([3], [4], name="neg"),
        op([4, 7], [5], kind=MATMUL, name="mm"),
        op([5, 2], [6], name="add"),
    ]
    assert [kernel.op for kernel in fuse(step)] == ["mm", "mm", "fused neg", "mm", "fused to add"]
    read_twice = [*step, op([2, 3], [10], name="mul")]
    assert [kernel.op for kernel in fuse(read_twice)] == ["mm", "mm", "fused to neg mul", "mm", "fused add"]


def test_what_only_one_reads_is_computed_there():
    """On a norm's way back: x² is ready long before the gradient comes, and is not written for it to be read."""
    step = [op([0], [1], name="pow"), op([8, 9], [2], kind=MATMUL, name="mm"), op([1, 2], [3], name="mul")]
    product, norm = fuse(step)
    assert (product.op, norm.op) == ("mm", "fused pow mul")
    assert {t for t, _ in norm.reads} == {0, 2}


def test_what_is_added_to_in_place_is_read():
    """A residual stream's gradient, which the way back of every norm adds to."""
    (one,) = fuse([op([0], [1], name="neg"), op([5, 1], [5], name="add_")])
    assert sorted(t for t, _ in one.reads) == [0, 5]
    assert [t for t, _ in one.writes] == [5]


def test_a_tensor_from_outside_is_read_whole_where_someone_reads_it_whole():
    whole, half = op([0], [1], name="neg"), halved(op([0], [2], name="exp"))
    for step in ([whole, half], [half, whole]):
        assert fuse(step)[0].reads == ((0, 4 * SIZE),)


def test_both_halves_of_a_tensor_are_read():
    """Gate and up of one product, each read as half of it; but the same half that two read is read once at most as a whole."""
    gate, up = (halved(op([1], [t], name=name)) for t, name in ((2, "silu"), (3, "neg")))
    step = [op([0, 9], [1], kind=MATMUL, name="mm"), gate, up, op([2, 3], [4], name="mul")]
    _, one = fuse(step)
    assert one.reads == ((1, 4 * SIZE),)
    _, one = fuse([*step[:3], halved(op([1], [6], name="exp")), op([2, 3, 6], [4], name="mul")])
    assert one.reads == ((1, 4 * SIZE),)


def test_what_several_want_in_another_dtype_is_cast_once():
    """As q, k and v do under autocast; not what has changed in between, nor what is changed later, nor other halves."""
    made = op([0, 8], [1], kind=MATMUL, name="mm")
    casts = [shrunk(op([1], [t], kind=COPY, name="to")) for t in (2, 3)]
    products = [op([t, 9], [t + 10], kind=MATMUL, name="mm") for t in (2, 3)]
    _, cast, *after = fuse([made, casts[0], products[0], casts[1], products[1]])
    assert (cast.op, [one.op for one in after]) == ("fused to", ["mm", "mm"])
    assert all(2 in dict(one.reads) for one in after)
    source, first, result = (op([t, 7], [t], name="add_") for t in (1, 2, 3))
    for step in (
        [made, casts[0], products[0], source, casts[1], products[1]],
        [made, casts[0], products[0], casts[1], result, products[1]],
        [made, casts[0], products[0], first, casts[1], products[1]],
        [made, halved(casts[0]), products[0], halved(casts[1]), products[1]],
        [made, casts[0], products[0], msgspec.structs.replace(casts[1], dtype="fp16"), products[1]],
    ):
        assert 3 in dict(next(one for one in fuse(step) if 13 in dict(one.writes)).reads)


def test_the_way_back_may_begin_halfway():
    """A sum is written for what comes, and normed; the way back makes the normed rows from the sum, not from its two parts."""
    step = [
        op([0, 1], [2], name="add"),
        op([2], [3], name="mul"),
        op([3], [6], name="neg"),
        op([6, 9], [4], kind=MATMUL, name="mm"),
        op([2, 4], [5], name="add"),
        op([3, 7], [8], name="mul_backward", phase="backward"),
    ]
    first, *_, back = fuse(step)
    assert set(dict(back.reads)) == {2, 7}
    assert set(dict(first.writes)) == {2, 6}
    gate = msgspec.structs.replace(step[1], reads=((2, 4 * SIZE), (11, 2 * SIZE)))
    gated = [step[0], gate, *step[2:]]
    assert set(dict(fuse(gated)[-1].reads)) == {2, 7, 11}  # what else it is made from is read, too


def test_a_compiled_cast_is_as_fast_as_other_kernels_and_a_norm_as_our_own():
    """PyTorch's cast of bf16 reaches half of a copy's bandwidth; what is compiled loads in wide words."""
    alone = halved(op([0], [1], kind=COPY, name="to"))
    (compiled,) = fuse([alone])
    assert (curve_name(alone), curve_name(compiled)) == ("copy/cast, half", "elementwise")
    (norm,) = fuse([op([0], [1], kind=NORMALISATION, name="layer_norm")])
    assert curve_name(norm) == "normalisation, rms"
    assert fuse([alone], lambda one: None) == [alone]  # not compiled


def test_phases_do_not_mix_and_what_another_phase_reads_is_kept_where_it_is_the_least_to_read():
    forward, backward = fuse([op([0, 9, 8, 7], [1]), op([1], [2]), op([2], [3], phase="backward")])
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert {t for t, _ in forward.writes} == {2}
    assert {t for t, _ in backward.reads} == {2}


def test_the_way_back_computes_again_what_is_cheap_to_compute():
    """A gate: its sigmoid is there for the way back alone, the product for the next matmul too."""
    forward = [op([0], [1], name="sigmoid"), op([0, 1], [2], name="mul"), op([2, 8], [3], kind=MATMUL, name="mm")]
    backward = [op([5, 0, 1], [6], name="silu_backward", phase="backward"), op([2, 5], [7], MATMUL, "mm", "backward")]
    gate, _, way_back, _ = fuse([*forward, *backward])
    assert {t for t, _ in gate.writes} == {2}  # a matmul on the way back wants it as it is
    assert {t for t, _ in way_back.reads} == {5, 0}
    assert gate.write_bytes == 4 * SIZE
    eager = fuse([*forward, *backward], lambda one: None)  # nothing is compiled
    assert {t for kernel in eager for t, _ in kernel.writes} == {1, 2, 3, 6, 7}


def test_sums_of_rows_are_kept_for_the_way_back():
    small = OpWork(
        op="sum", module="", phase="forward", kind=REDUCTION, dtype="fp32", reads=((0, 4 * SIZE),), writes=((1, 16),),
        read_bytes=4 * SIZE, write_bytes=16, shapes=((SIZE,),),
    )  # fmt: skip
    forward, backward = fuse([small, op([0, 1], [2]), op([2, 1, 4], [3], phase="backward")])
    assert {t for t, _ in forward.writes} == {1}
    assert {t for t, _ in backward.reads} == {1, 4, 0}


def test_a_row_and_its_sum_share_a_kernel_but_not_things_of_another_size():
    row = [
        op([0], [1], kind=REDUCTION, name="sum"),
        op([1], [2], name="rsqrt", elements=64),
        op([0, 2], [3], name="mul"),
    ]
    assert len(fuse(row)) == 1
    assert len(fuse([op([0], [1], elements=4096), op([1], [2], elements=1000)])) == 2


@st.composite
def graphs(draw):
    numbers, ops = count(3), []
    made = [0, 1, 2]
    for _ in range(draw(st.integers(0, 25))):
        reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        written = next(numbers)
        kind = draw(st.sampled_from((ELEMENTWISE, ELEMENTWISE, REDUCTION, MATMUL)))
        ops.append(
            op(reads, [written], kind=kind, module=draw(st.sampled_from(("blocks.0.mlp", "blocks.1.mlp", "norm"))))
        )
        made.append(written)
    return ops


@settings(max_examples=120, deadline=None)
@given(graphs(), st.sampled_from((whole_model, block_of)))
def test_the_laws(step, graph):
    fused = fuse(step, graph)
    assert sum(o.flops for o in fused) == sum(o.flops for o in step)
    assert sum(o.kind in NEVER_FUSED for o in fused) == sum(o.kind in NEVER_FUSED for o in step)
    assert sum(o.read_bytes + o.write_bytes for o in fused) <= sum(o.read_bytes + o.write_bytes for o in step)
    known, made = {0, 1, 2}, {t for o in fused for t, _ in o.writes}
    for kernel in fused:  # in this order, everything is there when it is read: no kernel waits for a later one
        assert {t for t, _ in kernel.reads} <= known | ({0, 1, 2} - made)
        known |= {t for t, _ in kernel.writes}


def test_our_kernels_are_closed_to_the_compiler():
    own = {"norm": "triton", "activation": "triton", "rope": "triton"}
    ops = account_step(workload("tiny", phase="backward", **own)).ops
    ours = [op for op in ops if op.op.startswith("flopwise::")]
    assert ours
    assert sum(op.op.startswith("flopwise::") for op in fuse(ops)) == len(ours)


def test_compiled_blocks_fuse_within_a_block_and_the_rest_runs_as_it_is():
    asked = workload("tiny", phase="backward", norm="eager")
    eager = account_step(asked).ops
    whole, blocks = fuse(eager), fuse(eager, block_of)
    assert len(whole) < len(blocks) < sum(op.kernels > 0 for op in eager)
    assert sum(op.flops for op in blocks) == sum(op.flops for op in eager)
    inside = [op for op in blocks if op.op.startswith("fused")]
    assert {re.match(r"blocks\.\d+|loss", op.module).group() for op in inside} == {"loss", "blocks.0", "blocks.1"}
    alone = [op for op in eager if op.module == "norm" and op.kernels]
    assert {op for op in blocks if op.module == "norm"} == set(alone)


def test_a_chain_over_two_blocks_is_cut_between_them():
    chain = [op([n], [n + 1], module=f"blocks.{n // 2}") for n in range(4)]
    assert [kernel.module for kernel in fuse(chain, block_of)] == ["blocks.0", "blocks.1"]
    assert len(fuse(chain)) == 1


def test_a_sum_over_columns_takes_a_second_kernel_that_reads_again():
    def backward(name, reads, writes, sizes, kind):
        return OpWork(
            op=name, module="", phase="backward", kind=kind, dtype="fp32", reads=tuple((t, 8 * SIZE) for t in reads),
            writes=tuple(zip(writes, sizes, strict=True)), read_bytes=8 * SIZE * len(reads), write_bytes=sum(sizes),
            shapes=((SIZE // 32, 64),),
        )  # fmt: skip

    rows = backward("norm", [0, 1], [2], [8 * SIZE], ELEMENTWISE)
    gain = backward("sum", [0, 1], [3], [4 * 64], REDUCTION)
    (both,) = fuse([rows, gain])
    assert both.kernels == 2
    assert both.read_bytes == 2 * 8 * SIZE  # at least
    assert sum(size for _, size in both.reads) == 4 * 8 * SIZE
    (one,) = fuse([rows, backward("sum", [0, 1], [3], [4 * SIZE // 32], REDUCTION)])  # a number for every row
    assert (one.kernels, one.read_bytes) == (1, 2 * 8 * SIZE)


def test_as_many_rows_as_columns():
    """A sum of rows is not taken for one of columns because it is as long: what follows in the kernel reads it."""
    square = ((64, 64),)
    total = msgspec.structs.replace(op([0], [1], kind=REDUCTION, name="sum"), write_bytes=256, shapes=square)
    total = msgspec.structs.replace(total, writes=((1, 256),))
    scaled = msgspec.structs.replace(op([0, 1], [2], name="mul"), shapes=square)
    (rows,) = fuse([total, scaled])
    (columns,) = fuse([total, msgspec.structs.replace(scaled, reads=scaled.reads[:1])])
    assert (rows.kernels, columns.kernels) == (1, 2)
