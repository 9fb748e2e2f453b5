"""Ceilings of a GPU that was not calibrated: its datasheet, and the share that libraries usually reach (constants.py)."""

from flopwise.errors import FlopwiseError
from flopwise.predict import constants as usual
from flopwise.predict.calibration import tiles
from flopwise.records.ceilings import SPECIFIED, Ceilings, Curve, Matmul
from flopwise.spec.gpu import Gpu


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
    share, bandwidth = gpu.matmul_share_seen or usual.MATMUL_SHARE, gpu.bandwidth_bytes_s
    matmul = {dtype: peak * share * (usual.TF32_SHARE if dtype == "tf32" else 1.0) for dtype, peak in gpu.peaks.items()}
    return Ceilings(
        gpu=gpu.name,
        how=SPECIFIED,
        processors=gpu.sms,
        bandwidth_bytes_per_s=bandwidth,
        matmul={dtype: _matmul(dtype, rate, gpu.sms) for dtype, rate in matmul.items()},
        memory={
            kind: _curve(reached * bandwidth, gpu.l2_bytes or 0) for kind, reached in usual.BANDWIDTH_SHARES.items()
        },
        attention=_attention(gpu, 0),
        attention_backward=_attention(gpu, 1),
        host=usual.HOST,
        latency_ns=usual.LATENCY_NS,
        graph_gap_ns=usual.GRAPH_GAP_NS,
        compiled_call_ns=usual.COMPILED_CALL_NS,
    )


def _attention(gpu: Gpu, way: int) -> dict[str, Curve]:
    """By precision what PyTorch picks, and other backends as shares of its rate; `way`: 0 forward, 1 backward."""
    found: dict[str, Curve] = {}
    for dtype, shares in usual.ATTENTION_SHARES.items():
        others = usual.CUDNN_SHARES if gpu.capability.startswith(("9.", "10.")) and dtype in ("bf16", "fp16") else {}
        if dtype in gpu.peaks:
            rate = gpu.peaks[dtype] * shares[way]
            found |= {dtype: _compute_curve(rate)} | {
                f"{dtype}, {b}": _compute_curve(rate * s) for b, s in others.items()
            }
    return found


def _matmul(dtype: str, reached: float, processors: int) -> Matmul:
    """`reached`: of the library's best product; a tile's rate is a little more, since a product begins and ends, too."""
    share, half_area, start_ns, per_area = usual.VECTOR_TILES if dtype == "fp32" else usual.TENSOR_TILES
    made = tiles(share * reached / processors, half_area, start_ns, per_area)
    return Matmul(peak_flops=reached, tiles=made, join_ns=usual.JOIN_NS)


def _curve(bytes_per_s: float, l2_bytes: int) -> Curve:
    """A start, then the bandwidth: that of the cache for small amounts, going over to the memory's."""
    amounts = [10.0**power * digit for power in range(4, 11) for digit in (1, 2, 5)]
    cached = [max(0.0, 1 - amount / l2_bytes) if l2_bytes else 0.0 for amount in amounts]
    rates = [bytes_per_s * (1 + (usual.L2_SPEEDUP - 1) * share) for share in cached]
    return Curve(
        amount=tuple(amounts),
        ns=tuple(usual.SHORTEST_KERNEL_NS + 1e9 * a / rate for a, rate in zip(amounts, rates, strict=True)),
    )


def _compute_curve(flops_per_s: float) -> Curve:
    amounts = [10.0**power for power in range(6, 16)]
    return Curve(amount=tuple(amounts), ns=tuple(2 * usual.SHORTEST_KERNEL_NS + 1e9 * a / flops_per_s for a in amounts))
