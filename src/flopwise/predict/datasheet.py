"""Ceilings of a GPU that nobody has calibrated: its datasheet, and what libraries usually reach of it.

The shares are no property of one chip. They were read off kernels of an H200 (the traces in tests/trace/fixtures and
benchmarks/results) and off published tables, and stand for what cuBLAS, cuDNN and PyTorch's own kernels reach anywhere.
"""

from flopwise.errors import FlopwiseError
from flopwise.predict.calibration import tiles
from flopwise.records.ceilings import SPECIFIED, STRIDED, Ceilings, Curve, HostCost, Matmul
from flopwise.spec.gpu import Gpu
from flopwise.work.operation import COPY, ELEMENTWISE, INDEX, LOSS, MEMORY, NORMALISATION, OPTIMIZER, REDUCTION, SOFTMAX

SHORTEST_KERNEL_NS = 2_200.0  # with the gap before it: 1.9 µs among its like, and what a change of kernel costs
MATMUL_SHARE = 0.80  # where none is known for the chip
TF32_SHARE = 0.82  # of that: TF32 loads twice the bytes that bf16 does for each multiply
L2_SPEEDUP = 1.6  # of what was just written and still lies in the cache
BANDWIDTH_SHARES = {
    ELEMENTWISE: 0.87,
    STRIDED: 0.50,
    REDUCTION: 0.45,
    SOFTMAX: 0.75,
    NORMALISATION: 0.50,
    COPY: 0.40,
    INDEX: 0.40,
    LOSS: 0.45,
    MEMORY: 0.87,
    OPTIMIZER: 0.80,
}
# Of the tile model (cost/calibration.py): the best rate as a share of the peak, the area of half that rate, the start.
TENSOR_TILES, VECTOR_TILES = (1.09, 2200.0, 1400.0, 0.08), (0.95, 1100.0, 9000.0, 0.23)
JOIN_NS = 2_500.0
# Forward, backward; FLOPs of the whole square, of which a causal kernel skips up to half.
ATTENTION_SHARES = {"fp32": (0.45, 0.35), "tf32": (0.06, 0.05), "bf16": (0.50, 0.40), "fp16": (0.50, 0.40)}
# Of cuDNN's rate, where that is what PyTorch picks (capability 9 and 10; benchmarks/results/kernels-2026-11.md).
BESIDE_CUDNN = {"flash": 0.62, "triton": 0.86}
HOST = {
    "forward": HostCost(op_ns=18_000.0, view_ns=2_500.0, kernel_ns=5_000.0),
    "backward": HostCost(op_ns=25_000.0, view_ns=2_500.0, kernel_ns=5_000.0),
    "optimizer": HostCost(op_ns=12_000.0, view_ns=2_000.0, kernel_ns=5_000.0, listed_ns=2_200.0),
}
LATENCY_NS, GRAPH_GAP_NS, COMPILED_CALL_NS = 4_000.0, -800.0, 300_000.0


def from_datasheet(gpu: Gpu) -> Ceilings:
    """What a GPU should reach by its datasheet.

    >>> from flopwise.spec.gpu import gpu
    >>> round(from_datasheet(gpu("h200")).matmul["bf16"].peak_flops / 1e12)
    792
    """
    if gpu.bandwidth_bytes_s is None or gpu.sms is None or "fp32" not in gpu.peaks:
        raise FlopwiseError(
            f"too little is known of {gpu.title} to predict a time",
            "measure it with flopwise doctor --calibrate, or name a GPU with --gpu",
        )
    share = gpu.matmul_share_seen or MATMUL_SHARE
    attention = [
        {f"{dtype}{backend}": gpu.peaks[dtype] * shares[way] * share for dtype, shares in ATTENTION_SHARES.items()
         if dtype in gpu.peaks for backend, share in _backends(gpu, dtype)}
        for way in (0, 1)
    ]  # fmt: skip
    return Ceilings(
        gpu=gpu.name,
        how=SPECIFIED,
        processors=gpu.sms,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_s,
        matmul={
            dtype: _matmul(dtype, peak * share * (TF32_SHARE if dtype == "tf32" else 1.0), gpu.sms)
            for dtype, peak in gpu.peaks.items()
        },
        memory={
            kind: _curve(reached * gpu.bandwidth_bytes_s, gpu.l2_bytes or 0)
            for kind, reached in BANDWIDTH_SHARES.items()
        },
        attention={way: _compute_curve(rate) for way, rate in attention[0].items()},
        attention_backward={way: _compute_curve(rate) for way, rate in attention[1].items()},
        host=HOST,
        latency_ns=LATENCY_NS,
        graph_gap_ns=GRAPH_GAP_NS,
        compiled_call_ns=COMPILED_CALL_NS,
    )


def _backends(gpu: Gpu, dtype: str) -> list[tuple[str, float]]:
    """What PyTorch picks, and others beside it, as shares of its rate."""
    others = BESIDE_CUDNN if gpu.capability.startswith(("9.", "10.")) and dtype in ("bf16", "fp16") else {}
    return [("", 1.0), *((f", {name}", share) for name, share in others.items())]


def _matmul(dtype: str, reached: float, processors: int) -> Matmul:
    """`reached`: of the library's best product; a tile's rate is a little more, since a product begins and ends, too."""
    share, half_area, start_ns, per_area = VECTOR_TILES if dtype == "fp32" else TENSOR_TILES
    made = tiles(share * reached / processors, half_area, start_ns, per_area)
    return Matmul(peak_flops=reached, tiles=made, join_ns=JOIN_NS)


def _curve(bytes_per_s: float, l2_bytes: int) -> Curve:
    """A start, then the bandwidth: that of the cache for small amounts, going over to the memory's."""
    amounts = [10.0**power * digit for power in range(4, 11) for digit in (1, 2, 5)]
    cached = [max(0.0, 1 - amount / l2_bytes) if l2_bytes else 0.0 for amount in amounts]
    rates = [bytes_per_s * (1 + (L2_SPEEDUP - 1) * share) for share in cached]
    return Curve(
        amount=tuple(amounts),
        ns=tuple(SHORTEST_KERNEL_NS + 1e9 * a / rate for a, rate in zip(amounts, rates, strict=True)),
    )


def _compute_curve(flops_per_s: float) -> Curve:
    amounts = [10.0**power for power in range(6, 16)]
    return Curve(amount=tuple(amounts), ns=tuple(2 * SHORTEST_KERNEL_NS + 1e9 * a / flops_per_s for a in amounts))
