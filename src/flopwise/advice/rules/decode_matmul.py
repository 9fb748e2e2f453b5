"""Matmuls of decoding read the weights slowly.

Looks for: a trace of a server in which all iterations decode, with the sizes of nine tenths of its matmuls (in the trace or in
that of the graphs' capture), and matmuls that read their weights at less than {REACHED_BANDWIDTH:%} of the memory's bandwidth, in
batches so small that bandwidth is their limit.
Saving: the matmuls' time − the weights' bytes at {REACHED_BANDWIDTH:%} of the bandwidth.
Fix: matmuls tuned for few rows (the engine's tuned configurations, another GEMM backend, split-K); weights in 8 or 4 bits have a
half or a quarter of the bytes.
"""

from flopwise import units
from flopwise.advice.facts import Facts, describe
from flopwise.advice.savings import Rule, reading_saved
from flopwise.records.finding import Finding
from flopwise.records.waterfall import MATMUL_OTHER, MATMUL_SHAPE
from flopwise.work.operation import MATMUL

CODE = (
    "# engine: tune its matmuls for this batch, or compare GEMM backends; quantised weights (fp8, int4) are fewer bytes"
)
RULE = Rule(__name__, (MATMUL_OTHER, MATMUL_SHAPE), code=CODE)


def check(facts: Facts) -> Finding | None:
    served, spent = facts.decoding, facts.class_ns(MATMUL)
    n_bytes = served.weights_bytes if served is not None else None
    if not n_bytes or not spent or not facts.decodes_by_bandwidth(1):
        return None
    if (found := reading_saved(facts, spent, n_bytes)) is None:
        return None
    saving, rate = found
    return RULE.finding(
        facts,
        f"matmuls read the weights at {rate}",
        saving,
        (
            f"weights read by an iteration: {units.size(n_bytes)}",
            *describe(facts.kernels(lambda kernel: kernel.kind == MATMUL)),
        ),
        evidence_ns=spent,
        matmul_ns=spent,
        weights_bytes=n_bytes,
        bytes_per_s=n_bytes / spent * 1e9,
    )
