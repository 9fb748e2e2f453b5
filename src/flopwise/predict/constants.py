"""Every fitted number behind a predicted time, with the measurement it comes from.

The measured steps are in benchmarks/results/h200-2026-11, the ceilings in benchmarks/results/ceilings-2026-11. To fit again on
a GPU:

    flopwise doctor --calibrate                        # this machine's ceilings
    python benchmarks/prediction_cases.py RUNS         # measured steps; with --held-out, those to judge by
    python benchmarks/prediction.py --time RUNS/…      # predicted and measured: change a number, run it again

How far off they leave a step is in benchmarks/results/prediction-time-2026-11.md; tests/predict/test_time_against_h200.py
holds them to it, and tests/predict/test_constants.py the pages that quote one.
"""

from typing import NamedTuple

from flopwise.records.ceilings import STRIDED, HostCost
from flopwise.work.operation import COPY, ELEMENTWISE, INDEX, LOSS, MEMORY, NORMALISATION, OPTIMIZER, REDUCTION, SOFTMAX

# --- Steps, whatever the machine (looked at: `prediction`, 95 steps; judged by: `prediction-held-out`, 29 steps)

# Of the smaller of the optimizer's time and backward's compute-bound time, what updating within the backward pass hides: both
# want the same multiprocessors. `medium` 4 × 512, compiled by blocks, as a graph: 0.45 of 2.0 ms, about a fifth. Again: the
# command in h200-2026-11/overlap-medium/run.json (flopwise bench medium … --versus overlap=on).
OVERLAP_SHARE = 0.2
# A step is launch-bound if its GPU is busy for less than this share of it and launching takes longer than its work (a judgement).
GPU_BUSY_SHARE = 0.9
# An op within this factor of the shortest kernel is bound by its launch, not by bandwidth (a judgement; no time depends on it).
SHORT_KERNEL = 1.5
# A graph's gap may be below zero; a kernel never takes less than this share of its time alone (a guard).
LEAST_KERNEL_SHARE = 0.25
# The host's work for calling a compiled graph, however small: guards, wrappers, the way into autograd. An estimate: no
# measurement of it alone is kept.
LEAST_CALL_NS = 40_000.0

# The rate of a product in fp8 over that in bf16, on an H200: 1.84, 2.04 and 2.18 at 16384 x 2560 x 10240, 16384 x 10240 x 2560
# and 8192 cubed. For machines whose fp8 products were not measured.
FP8_OVER_BF16 = 2.0
# The time of a layer's three products with a scale for every row over that with one for the tensor; gradients' sums are exact.
# Of eight layers on an H200 1.03 to 1.21, together 1.10 (benchmarks/results/fp8-2026-11/matmuls.json).
FP8_BY_ROWS = 1.10

# --- Matmuls: how far the miss of a measured product says something of another, shapes in powers of two. For products that are
# left out it lowers the median error from 7.0 to 4.0 % in bf16 and from 5.8 to 4.2 % in fp32 (ceilings-2026-11/h200.json;
# tests/predict/test_constants.py leaves each out again).
NEAR_WIDTH, NEAR_PRIOR, NEAR_ENOUGH = 1.2, 0.1, 10.0
# Rows of a matrix that are no whole number of 16 bytes: the share of the rate that is left, by the largest power of two (bytes)
# that divides them. Of 4096 × k × 4096 in bf16 on an H200 with k = 4097, 4098 and 4100 (h200-2026-11/lab, tile-quantization); the
# squares of 1793, 2049 and 2817 there, left out, have 0.18, 0.16 and 0.18. Taken for fp16, TF32 and other GPUs.
UNALIGNED_SHARES = {2: 0.171, 4: 0.333, 8: 0.330}
SPLITS = (1, 2, 4, 8, 16)  # along the inner dimension, which cuBLAS's split-K kernels have
# Eager softmax of rows that no shared memory holds (PyTorch takes 48 KiB of it at most) reads them again for each pass, two
# blocks of 1024 threads on a multiprocessor: forward three times; going back the second time partly from the cache. Read off the
# losses' kernels in traces of five steps on an H200, vocabularies of 30,522 to 151,936 (user-models-2026-11.md).
SHORT_ROW_BYTES, ROWS_AT_ONCE, LONG_ROW_READINGS = 48 * 1024, 2, (3.0, 1.65)
# Wider heads do twice as much for each score: they are probed, and have attention curves, of their own.
NARROW_HEAD = 64

# --- Compiled steps (fusion.py): read off Inductor's kernels in traces of an H200 (benchmarks/results/tune-2026-11.md has what
# is left of the difference)
LONGEST_ROW = 2**17  # elements that one loop still reduces
ROW_SHARE = 1 / 16  # of what a kernel reads: what is less is one number for each row
# A tensor that is handed to a compiled graph costs at most this share of a kernel's launch: a calibration of an H200 whose noise
# made kernels free and tensors dear is a case of tests/predict/test_calibration_fit.py.
LISTED_SHARE = 0.5

# --- A GPU that was not calibrated: what libraries reach of its datasheet. Read off the kernels of an H200 (the traces of
# tests/trace/fixtures, the probes of ceilings-2026-11) and taken for any chip.
SHORTEST_KERNEL_NS = 2_200.0  # with the gap before it: 1.9 µs among its like, and what a change of kernel costs
MATMUL_SHARE = 0.80  # of the peak, where none is known for the chip (spec/gpu.py has those with their source)
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
# The tile model (calibration.py): best rate as a share of the peak, area of half that rate, start, start per area.
TENSOR_TILES, VECTOR_TILES = (1.09, 2200.0, 1400.0, 0.08), (0.95, 1100.0, 9000.0, 0.23)
JOIN_NS = 2_500.0  # adding up the parts of a split product
# Forward, backward; FLOPs of the whole square, of which a causal kernel skips up to half.
ATTENTION_SHARES = {"fp32": (0.45, 0.35), "tf32": (0.06, 0.05), "bf16": (0.50, 0.40), "fp16": (0.50, 0.40)}
# Of cuDNN's rate, where that is what PyTorch picks (capability 9 and 10): benchmarks/results/kernels-2026-11.md.
CUDNN_SHARES = {"flash": 0.62, "triton": 0.86}
# No datasheet states a host: these are of earlier runs on the machines that the H200s were in (prediction-time-2026-11.md).
HOST = {
    "forward": HostCost(op_ns=18_000.0, view_ns=2_500.0, kernel_ns=5_000.0),
    "backward": HostCost(op_ns=25_000.0, view_ns=2_500.0, kernel_ns=5_000.0),
    "optimizer": HostCost(op_ns=12_000.0, view_ns=2_000.0, kernel_ns=5_000.0, listed_ns=2_200.0),
}
# An operation in fp8, times another one; which part of it takes so long was not measured. Fitted to one step, llama3.2-1b
# 4 x 1024 without a graph on an H200: 114.1 ms (benchmarks/results/fp8-2026-11.md).
FP8_HOST = 6.0
LATENCY_NS, GRAPH_GAP_NS, COMPILED_CALL_NS = 4_000.0, -800.0, 300_000.0

# --- Collectives that were not measured: NCCL 2.2x's own numbers, from which it chooses algorithm and protocol.
NVLINK, PCIE, NETWORK = "nvlink", "pcie", "network"  # classes of links


class RingProtocol(NamedTuple):
    """One way to send: what it costs to begin, then for every hop, and the share of the bandwidth that it leaves."""

    base_ns: float
    hop_ns: dict[str, float]  # by class of link; one that is missing does not have the protocol
    share: float


SLOWEST_NVLINK_BYTES_S = 100e9  # of a GPU in one direction: NVLink 2 has 150e9, PCIe 5 63e9 (spec/links.py)

# src/graph/tuning.cc: baseLat, hwLat and the bandwidth of rings, for LL (8-byte words with a flag each), LL128 and Simple.
RING_PROTOCOLS = (
    RingProtocol(6_600.0, {NVLINK: 600.0, PCIE: 1_000.0, NETWORK: 2_700.0}, 0.25),
    RingProtocol(14_000.0, {NVLINK: 1_900.0, NETWORK: 4_000.0}, 0.92),
    RingProtocol(8_400.0, {NVLINK: 3_400.0, PCIE: 5_700.0, NETWORK: 14_000.0}, 1.0),
)
# What data has of a link's datasheet, src/graph/topo.h: 20.0 of the 25 GB/s of an A100's NVLink (H100: 20.6 of 25, B200: 40.1 of
# 50), 12 of the 15.75 GB/s of 16 lanes of PCIe 3, 12 of the 12.5 GB/s of a 100 Gbit/s network.
LINK_SHARES = {NVLINK: 0.80, PCIE: 0.76, NETWORK: 0.96}

# --- Which lever to take: savings grow nearly linearly with depth, so those of deeper models are extrapolated (a judgement).
SHALLOW_LAYERS, DEEP_LAYERS = (2, 4), 8
LEVER_WORTH_NAMING = 0.02  # of the step: a smaller saving is within a prediction's error
