"""Inside attention: softmax compared with the matmuls of scores and values, in time and in FLOPs."""

import re

import msgspec
import polars as pl

from flopwise.trace.phases import LOSS
from flopwise.work.operation import ATTENTION, MATMUL, SOFTMAX, OpWork
from flopwise.work.sized import MATMULS, SOFTMAXES, op_flops

_ATTENTION = r"(?i)attn|attention"
_SOFTMAX = "(?i)softmax"
_SCORES_AND_VALUES = "(?i)scores|attn_pv|values?$|attn_value|final[ _]?matmul|weighted[ _]?sum|attn[ _]?output"


def in_core() -> pl.Expr:
    """Whether work belongs to attention that is written out, between its two matmuls: scale, mask, softmax."""
    where = _where()
    named = where.str.contains(_ATTENTION) & (where.str.contains(_SOFTMAX) | where.str.contains(_SCORES_AND_VALUES))
    return named | ((pl.col("class") == SOFTMAX) & (pl.col("phase") != LOSS))


def is_attention() -> pl.Expr:
    """Whether work lies in a range or module that names attention."""
    return _where().str.contains(_ATTENTION)


def is_inner() -> pl.Expr:
    """Whether it is of the scores or the values: these products are batched, the projections are not."""
    return _where().str.contains(_SCORES_AND_VALUES) | pl.col("op").fill_null("").str.contains("bmm|baddbmm")


def is_core(op: OpWork) -> bool:
    """The same of an operation that was accounted for.

    >>> is_core(OpWork(op="exp", module="blocks.0.attention.softmax", phase="forward", kind="elementwise", dtype="fp32"))
    True
    """
    if "loss" in (op.phase, op.module) or op.kind in (MATMUL, ATTENTION):
        return False
    named = re.search(_SOFTMAX, op.module) or re.search(_SCORES_AND_VALUES, op.module)
    return op.kind == SOFTMAX or bool(re.search(_ATTENTION, op.module) and named)


def _where() -> pl.Expr:
    return pl.concat_str(pl.col("path").fill_null(""), pl.col("module").fill_null(""), separator="/")


class AttentionParts(msgspec.Struct, frozen=True, kw_only=True):
    """Inside attention, in one direction, per step. FLOPs are None where the trace has no shapes, or not all of them."""

    softmax_ns: float  # with the elementwise work around it, where ranges name it
    matmul_ns: float  # scores and values, without the projections
    fused_ns: float  # where one kernel does all
    softmax_flops: float | None = None  # five an element forward, four backward
    matmul_flops: float | None = None  # two a multiply-add
    softmax_time_share: float | None = None  # of softmax and matmuls together
    softmax_flops_share: float | None = None
    rate_ratio: float | None = None  # FLOP/s of the matmuls over FLOP/s of softmax


def attention_parts(work: pl.DataFrame, shapes: tuple[str, ...], n: int) -> AttentionParts:
    """By the ranges and modules that name attention; the score and value matmuls are batched, the projections are not.

    `work` has totals by class, op, module and path: `duration_ns`, and in `ops` how many ops with the sizes `shape` began.
    """
    where = _where()
    scope = work.filter(is_attention())
    softmax = scope.filter((pl.col("class") == SOFTMAX) | where.str.contains(_SOFTMAX))
    inner = scope.filter(is_inner())
    matmul = inner.filter(pl.col("class") == MATMUL)
    softmax_ns, matmul_ns = (int(part["duration_ns"].sum()) / n for part in (softmax, matmul))
    softmax_flops = _flops(softmax, SOFTMAXES, softmax.filter(pl.col("class") == SOFTMAX), shapes, n)
    matmul_flops = _flops(inner, MATMULS, matmul, shapes, n)
    ratios = {}
    if softmax_ns and matmul_ns and softmax_flops and matmul_flops:
        ratios["softmax_flops_share"] = softmax_flops / (softmax_flops + matmul_flops)
        ratios["rate_ratio"] = (matmul_flops / matmul_ns) / (softmax_flops / softmax_ns)
    return AttentionParts(
        softmax_ns=softmax_ns,
        matmul_ns=matmul_ns,
        fused_ns=int(work.filter(pl.col("class") == ATTENTION)["duration_ns"].sum()) / n,
        softmax_flops=softmax_flops,
        matmul_flops=matmul_flops,
        softmax_time_share=softmax_ns / (softmax_ns + matmul_ns) if softmax_ns and matmul_ns else None,
        **ratios,
    )


def _flops(
    part: pl.DataFrame, ops: frozenset[str], kernels: pl.DataFrame, shapes: tuple[str, ...], n: int
) -> float | None:
    """FLOPs per step of these ops; None if there are none, or if one of their kernels has no sizes."""
    counted = part.filter(pl.col("op").is_in(ops), pl.col("ops") > 0)
    if not counted.height or (kernels["shape"] == 0).any():
        return None
    each = [op_flops(op, shapes[shape]) for op, shape in counted.select("op", "shape").iter_rows()]
    if any(flops is None for flops in each):
        return None
    return sum((flops or 0) * int(count) for flops, count in zip(each, counted["ops"], strict=True)) / n
