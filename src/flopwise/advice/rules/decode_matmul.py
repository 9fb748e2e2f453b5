"""Matmuls of decoding read the weights slowly.

Looks for: a trace of a server in which all iterations decode, with the sizes of nine tenths of its matmuls (in the trace or in
that of the graphs' capture), and matmuls that read their weights at less than {REACHED_BANDWIDTH:%} of the memory's bandwidth, in
batches so small that bandwidth is their limit.
Saving: the matmuls' time − the weights' bytes at {REACHED_BANDWIDTH:%} of the bandwidth.
Fix: matmuls tuned for few rows (the engine's tuned configurations, another GEMM backend, split-K); weights in 8 or 4 bits have a
half or a quarter of the bytes.
"""

from flopwise import units
from flopwise.advice.constants import REACHED_BANDWIDTH
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.records.finding import LOW, Finding
from flopwise.records.waterfall import MATMUL_OTHER, MATMUL_SHAPE
from flopwise.work.operation import MATMUL

CODE = (
    "# engine: tune its matmuls for this batch, or compare GEMM backends; quantised weights (fp8, int4) are fewer bytes"
)
RULE = Rule(__name__, (MATMUL_OTHER, MATMUL_SHAPE), code=CODE)


def check(facts: Facts) -> Finding | None:
    served, spent, bandwidth = facts.decoding, facts.class_ns(MATMUL), facts.bandwidth
    if served is None or not served.weights_bytes or not spent or not bandwidth or not facts.decodes_by_bandwidth(1):
        return None
    least = served.weights_bytes / (REACHED_BANDWIDTH * bandwidth) * 1e9
    if least >= spent:
        return None
    size, rate = units.size(served.weights_bytes), served.weights_bytes / spent * 1e9
    arithmetic = (
        f"{units.duration(spent)} − {size} at {units.percent(REACHED_BANDWIDTH, 0)} of {units.rate(bandwidth, 'B/s')} "
        f"({units.duration(least)}) = {units.duration(spent - least)}"
    )
    share = units.percent(rate / bandwidth, 0)
    title = f"matmuls read the weights at {units.rate(rate, 'B/s')}, {share} of the memory's bandwidth"
    kernels = describe(facts.kernels(lambda kernel: kernel.kind == MATMUL))
    saving = gpu_time_saved(facts, spent - least, arithmetic, LOW)
    return RULE.finding(
        facts,
        title,
        saving,
        (f"weights read by an iteration: {size}", *kernels),
        evidence_ns=spent,
        matmul_ns=spent,
        weights_bytes=served.weights_bytes,
        bytes_per_s=rate,
    )
