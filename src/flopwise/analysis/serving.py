"""Iterations of a serving engine: prefill and decode, the time of an output token, and what decoding cannot do without.

An iteration of decoding reads all weights and the cache of its requests once, whatever its batch: no faster than these bytes at
the memory's bandwidth. Weights are the sizes of the matmuls, where the trace (or that of the capture) has shapes for nine tenths
of their time; the cache's bytes per token are what an op writes into it for one.
"""

from collections.abc import Sequence
from math import prod
from statistics import median

import msgspec
import polars as pl

from flopwise import units
from flopwise.analysis.product_sizes import products
from flopwise.analysis.step_times import STEADY, StepTime
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.gpu import Gpu
from flopwise.trace.iterations import DECODE, MIXED, PREFILL, Batch, batch_of
from flopwise.trace.phases import is_iteration
from flopwise.trace.tables import MODULE, Trace
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import MATMUL
from flopwise.work.recorded import recorded
from flopwise.work.sized import writes_cache

_MOSTLY_SIZED = 0.9  # of the matmuls' time: fewer sizes, and some weights are not counted
_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp64": 8.0, "fp8": 1.0, "int8": 1.0, "fp6": 0.75, "fp4": 0.5}
_HALF_BYTES = 2.0
_APART = 2.0  # a model's weights and those that are read: further apart, it is another one
_FAR_TOO_FAST = 0.02  # of the matmuls' time: a model that needs less at best is another one


class IterationKind(msgspec.Struct, frozen=True, kw_only=True):
    """Iterations of one kind; medians and means of them."""

    kind: str  # PREFILL, DECODE or MIXED
    count: int
    ns: float  # the median, traced
    requests: float  # of both kinds, on average
    prefill_tokens: float | None  # None: not annotated
    decode_requests: float
    context_tokens: float | None  # in the cache of those that decode
    tokens_per_s: float | None  # prompts' tokens read and tokens made
    in_graphs: float = 0.0  # share of the iterations with most of their work in CUDA graphs


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace of a server shows; times as traced."""

    kinds: tuple[IterationKind, ...]
    output_token_ns: float | None = None  # the median time in which a request that decodes gets one token
    output_token_mean_ns: float | None = None  # the mean, prefills between two iterations that decode included
    output_tokens_per_s: float | None = None
    weights_bytes: float | None = None  # read by an iteration, by the sizes of its matmuls
    cache_bytes_per_token: float | None = None  # keys and values of one token, all layers
    decode_cache_bytes: float | None = None  # read by an iteration that decodes, on average

    @property
    def decode_bytes(self) -> float | None:
        """What an iteration of decoding reads at least; None where the weights are not known."""
        return None if self.weights_bytes is None else self.weights_bytes + (self.decode_cache_bytes or 0.0)

    def of(self, kind: str) -> IterationKind | None:
        """The iterations of one kind, if there are any."""
        return next((one for one in self.kinds if one.kind == kind), None)


def by_model(found: Serving, weights_bytes: float, cache_bytes_per_token: float) -> Serving:
    """The same with what a model's shape tells, where the trace does not."""
    per_token = found.cache_bytes_per_token or cache_bytes_per_token
    decoding = [one for one in found.kinds if one.decode_requests]
    contexts = [one.context_tokens * one.count for one in decoding if one.context_tokens is not None]
    cached = sum(contexts) / sum(one.count for one in decoding) if contexts and len(contexts) == len(decoding) else None
    return msgspec.structs.replace(
        found,
        weights_bytes=found.weights_bytes or weights_bytes,
        cache_bytes_per_token=per_token,
        decode_cache_bytes=cached * per_token if cached else found.decode_cache_bytes,
    )


def mismatch(
    traced: Serving, named: Serving, weights_bytes: float, spent_ns: tuple[float, float], gpu: Gpu | None
) -> str:
    """Why a named model cannot be the one that was `traced`; '' if it can. `spent_ns`: in matmuls, and of the GPU in all."""
    size = units.size(weights_bytes)
    if traced.weights_bytes and not 1 / _APART < weights_bytes / traced.weights_bytes < _APART:
        return f"the matmuls of an iteration read {units.size(traced.weights_bytes)} of weights, that model has {size}"
    if gpu is None or not gpu.bandwidth_bytes_s:
        return ""
    (matmul_ns, busy_ns), least = spent_ns, (named.decode_bytes or 0.0) / gpu.bandwidth_bytes_s * 1e9
    if least > busy_ns:
        read = units.size(named.decode_bytes or 0.0)
        rate = units.rate(gpu.bandwidth_bytes_s, "B/s")
        return f"{read} of weights and cache take {units.duration(least)} at {rate}, the GPU works {units.duration(busy_ns)}"
    count = sum(one.count for one in traced.kinds)
    tokens = sum(((one.prefill_tokens or 0.0) + one.decode_requests) * one.count for one in traced.kinds) / count
    peak = gpu.peak("bf16") or gpu.peak("fp16") or gpu.bandwidth_bytes_s
    needed = 1e9 * weights_bytes * max(1 / gpu.bandwidth_bytes_s, tokens / peak)  # 2 FLOPs for 2 bytes
    if needed < _FAR_TOO_FAST * matmul_ns:
        return (
            f"its matmuls take {units.duration(matmul_ns)}, those of {size} of weights {units.duration(needed)} at best"
        )
    return ""


def with_batches(times: Sequence[StepTime], trace: Trace, starts_ns: Sequence[int]) -> tuple[StepTime, ...]:
    """The steps with what their ranges say they serve; of several ranges in one, the one that says most."""
    named = {
        number: found for number, name in enumerate(trace.names) if is_iteration(name) and (found := batch_of(name))
    }
    if not named:
        return tuple(times)
    ranges = trace.ranges.filter(pl.col("name").is_in(list(named)), pl.col("kind") != MODULE)
    step = pl.Series(starts_ns).search_sorted(ranges["start_ns"], side="right")
    best: dict[int, Batch] = {}
    for place, number in zip(step.to_list(), ranges["name"].to_list(), strict=True):
        if place - 1 not in best or named[number].known > best[place - 1].known:
            best[place - 1] = named[number]
    return tuple(msgspec.structs.replace(one, batch=best.get(place)) for place, one in enumerate(times))


def serving(times: Sequence[StepTime], trace: Trace, work: pl.DataFrame, n: int) -> Serving | None:
    """Of a trace whose steps say what they serve; `work` are an Attribution's rows of the `n` steady ones."""
    annotated = [(one.ns, one.in_graphs, one.batch) for one in times if one.batch is not None and one.kind == STEADY]
    by_kind = {kind: [one for one in annotated if one[2].kind == kind] for kind in (PREFILL, DECODE, MIXED)}
    if not any(by_kind.values()):
        return None
    found = Serving(
        kinds=tuple(_kind(kind, some) for kind, some in by_kind.items() if some),
        weights_bytes=_weights(trace, work, n),
        cache_bytes_per_token=_cache_bytes(trace, work, n),
    )
    return _with_decoding(found, [(ns, batch) for ns, _, batch in annotated])


def _with_decoding(found: Serving, iterations: Sequence[tuple[int, Batch]]) -> Serving:
    places = [place for place, (_, batch) in enumerate(iterations) if batch.decode_requests]
    if not places:
        return found
    decoding, all_ns = [iterations[place] for place in places], sum(ns for ns, _ in iterations)
    while_decoding = sum(ns for ns, _ in iterations[places[0] : places[-1] + 1])
    cached, per_token = _mean([batch.decode_context for _, batch in decoding]), found.cache_bytes_per_token
    return msgspec.structs.replace(
        found,
        output_token_ns=median(ns * batch.decode_requests / batch.output_tokens for ns, batch in decoding),
        output_token_mean_ns=while_decoding / sum(batch.output_tokens / batch.decode_requests for _, batch in decoding),
        output_tokens_per_s=sum(batch.output_tokens for _, batch in decoding) / all_ns * 1e9,
        decode_cache_bytes=cached * per_token if cached and per_token else None,
    )


def _kind(kind: str, some: Sequence[tuple[int, bool, Batch]]) -> IterationKind:
    batches, took, n = [batch for _, _, batch in some], sum(ns for ns, _, _ in some), len(some)
    read = _mean([batch.prefill_tokens if batch.prefill_requests else 0 for batch in batches])
    decoding = sum(batch.decode_requests for batch in batches)
    made = sum(batch.output_tokens for batch in batches)
    return IterationKind(
        kind=kind,
        count=n,
        ns=float(median(ns for ns, _, _ in some)),
        requests=(sum(batch.prefill_requests for batch in batches) + decoding) / n,
        prefill_tokens=read,
        decode_requests=decoding / n,
        context_tokens=_mean([batch.decode_context for batch in batches]),
        tokens_per_s=None if read is None else (read * n + made) / took * 1e9,
        in_graphs=sum(in_graphs for _, in_graphs, _ in some) / n,
    )


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _weights(trace: Trace, work: pl.DataFrame, n: int) -> float | None:
    """Bytes of the matrices that activations are multiplied with: of a product of two, the one that has no tokens in it."""
    sized = [one for one in products(trace, work, n) if one.batch == 1]
    spent = int(work.filter(pl.col("class") == MATMUL)["duration_ns"].sum()) / n
    if not spent or sum(one.gpu_ns for one in sized) < _MOSTLY_SIZED * spent:
        return None
    return sum(one.count * one.k * one.n * _item_bytes(one.kernel) for one in sized) or None


def _item_bytes(kernel: str) -> float:
    told = matmul_precision(kernel)
    return _BYTES.get(told.precision, _HALF_BYTES) if told is not None else _HALF_BYTES


def _cache_bytes(trace: Trace, work: pl.DataFrame, n: int) -> float | None:
    """What an iteration writes into the cache for one token: of the op that does, the width of keys and values, each layer."""
    inputs = dict(trace.op_inputs.iter_rows())
    launch = pl.when(pl.col("attributed") == "graph").then("launch_ns")
    rows = work.filter(pl.col("op_index").is_not_null()).select(pl.col("op").cast(pl.String), "op_index", launch=launch)
    rows = rows.filter(pl.col("op").is_in([op for op in rows["op"].unique() if writes_cache(op)])).unique()
    by_op: dict[str, float] = {}
    for op, index, _ in rows.iter_rows():
        found = recorded(trace.inputs[inputs[index]]) if index in inputs else None
        keys, values, cache = (found.at(place) if found is not None else None for place in range(3))
        if keys is not None and values is not None:
            item = item_bytes((cache or keys).dtype or keys.dtype)
            by_op[op] = by_op.get(op, 0.0) + (prod(keys.shape[1:]) + prod(values.shape[1:])) * item / n
    return max(by_op.values(), default=None)
