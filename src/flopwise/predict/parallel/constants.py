"""Every fitted number behind a plan, with where it comes from.

'Fitted' means: by the rows of public documents that benchmarks/plan_accuracy.py does not hold out (benchmarks/plan_rows.py turns
rows into jobs), all at once, by the mean relative error with every document's weight the root of its rows. How far off they leave
the rest is in benchmarks/results/plan-2026-11.md. None is of a row. Two kinds rest on one source, which states other software or
power: launching and waiting of Megatron of 2021 (vTrain's rows), and chips held at 500 W (torchtitan's).
"""

# --- Computing
# Of the rate that the best products reach on a cool chip, what is left within hours of training, by capability. Fitted; chips
# after Hopper take Hopper's, too few of their rows are known.
SUSTAINED, SUSTAINED_ELSE = {"7.0": 0.98, "8.0": 0.98}, 0.82
LOW_SUSTAINED = {"fp8": 0.98, "mxfp8": 0.95, "nvfp4": 0.80}  # of that, in few bits: fp8 fitted, the others a judgement
FP4_RATE = {"10.0": 2.0, "10.3": 3.0}  # times fp8's, by NVIDIA's datasheets of the GB200 and the GB300
POWER = 0.65  # a chip that may take the share p of its usual power keeps p to this of its rate; fitted, of chips held at 500 W
# Each tile of a product's result costs as much again as so many steps along K: to fill the pipeline, and to write. Fitted.
TILE_DEPTH = 194.0
# Of the memory's bandwidth, in kernels between the matmuls, by who wrote them: the first two fitted, the last a judgement.
PASS_SHARES = {"eager": 0.38, "fused": 0.58, "compiled": 0.75}
# AdamW with fp32 masters: its share of the bandwidth, and the bytes of a weight, with clipping and clearing. Counted.
UPDATE_SHARE, UPDATE_BYTES = 0.75, 38.0
# Where the host updates, what its memory gives the process of one GPU: a judgement, by 400 GB/s for eight of them.
OFFLOAD_BYTES_S = 50e9
# Fused attention: of the peak in half precision, by the FLOPs that the causal mask leaves; forward, backward. FlashAttention-2's
# and -3's papers for A100 and H100; a judgement for Blackwell.
FLASH_SHARES = {"8.0": (0.62, 0.52), "9.0": (0.62, 0.52), "10.0": (0.50, 0.42), "10.3": (0.55, 0.45)}
OLD_FLASH_SHARES = {"8.0": (0.54, 0.25), "9.0": (0.34, 0.18)}  # kernels of 2023 and before, written for Ampere: fitted
FLASH_ELSE = (0.40, 0.35)
# Bytes that the loss moves for each logit, forward and backward: counted.
LOSS_BYTES = {"eager": (14.0, 10.0), "fused": (16.0, 8.0), "compiled": (8.0, 6.0)}
# Readings and writings of the scores where attention is not one kernel: by Megatron's fused softmax, and by PyTorch's in fp32.
SOFTMAX_PASSES, LOOSE_SOFTMAX_PASSES = (2.0, 3.0), (14.0, 11.0)
LOOSE_KERNELS = (10, 12)  # more of them, forward and backward: fitted, 1.5 ms for each layer
DROPOUT_PASSES = 2.5

# --- Launching: nanoseconds of the host for each kernel, forward, recomputed and backward, by how it is launched. The last is
# fitted (3.5 ms for each layer of a small model, whatever is in it); the others are a judgement by our own H200 steps.
HOST_NS = {
    "eager": (14_000.0, 14_000.0, 14_000.0),
    "compiled": (6_000.0, 6_000.0, 6_000.0),
    "checkpointed": (50_000.0, 49_000.0, 44_000.0),
}
HOST_STEP_NS = {"eager": 0.0, "compiled": 0.0, "checkpointed": 700_000.0}  # of a micro-batch that waits for its host
KERNELS = {
    "eager": (22, 44),
    "fused": (18, 36),
    "compiled": (14, 26),
}  # of a dense layer, forward and backward: counted
EXPERT_KERNELS = (30, 50)  # and of a layer's experts

# --- Exchanging
# What is left of a link's datasheet for large messages, and what a message costs to begin: NCCL's own model (predict/constants).
LINK_SHARES = {"inside": 0.80, "between": 0.93}
MESSAGE_NS = {"inside": 20_000.0, "between": 30_000.0}
HOP_NS = {"inside": 1_040.0, "between": 800.0}  # of a ring, fitted
WAIT_NS = 19_000.0  # more for each exchange of tensor ranks by a program that waits for it: fitted
SLOWED = 0.24  # of the time that an exchange takes behind computing: by so much longer the computing takes; fitted
TENSOR_HIDDEN = 0.90  # of what tensor ranks exchange, where programs hide it in pieces; fitted
EXPERTS_HIDDEN = 0.60  # of tokens' travels, where they are behind another micro-batch: a judgement
STAGE_HIDDEN = 0.50  # of what stages send, where programs overlap: a judgement
ROOM = 0.90  # of a pass, behind which gradients or weights can travel: the first or last of them cannot
JITTER = 0.013  # of the step, by each doubling of the hosts that wait for each other at every layer; fitted

# --- Memory that no tensor holds
# Of what comes and goes within a step, what the caching allocator has reserved beyond it: with it the median signed error of six
# rows of Llama 405B by torchtitan, which state reserved bytes, is zero (benchmarks/plan_memory.py; two rows of 70B are held out).
FRAGMENT_SHARE = 0.14
NCCL_BYTES = 256e6  # of a communicator: its channels' buffers of 4 MiB and less for both neighbours (an estimate)
CONTEXT_BYTES = 0.5e9  # of a process before its first tensor: CUDA's own, and kernels (an estimate)
