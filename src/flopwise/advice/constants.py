"""Every threshold and fitted number of the rules, the predictions of levers and the tuner, with its source.

*Judgement*: chosen, not measured; nothing else rests on its exact value. Where a number was measured, the document or the
command behind it is named. The page on the findings quotes these by name, so that it cannot disagree with them.
"""

from flopwise.analysis.ranks.stragglers import STRAGGLER_SHARE as STRAGGLER_SHARE
from flopwise.analysis.untraced import LAUNCH_QUEUE as LAUNCH_QUEUE
from flopwise.predict.constants import OVERLAP_SHARE as OVERLAP_SHARE

# --- which findings are reported (judgement)
LEAST_SAVING_SHARE = 0.01  # of the step: a smaller saving is not worth a line
LEAST_SAVING_NS = 100_000.0  # nor is one under 0.1 ms …
SHORT_STEP_SHARE = 0.05  # … unless it is this share of a short step
LEAST_SAVING_BYTES = 2**28

# --- what a saving of GPU time is worth to the step
# Of the step idle by late launches: at this share and above, the GPU waits for all the time it saves. Judgement.
HOST_BOUND_SHARE = 0.5

# --- rules: when they speak (judgement, unless a source is given)
LAUNCH_BOUND_SHARE = 0.05  # of the step idle by late launches
OPTIMIZER_SHARE = 0.05  # of the step in an optimizer that could overlap
LOGITS_SHARE, LOGITS_BYTES = 0.02, 2**30  # of the step in the loss, or of memory
FRAGMENTED_SHARE, FRAGMENTED_BYTES = 0.10, 2**30  # reserved beyond the peak
FITS_SHARE, NEARLY_FULL_SHARE = 0.90, 0.92  # of the memory: recomputation is not needed; is missing
THROTTLED_SHARE, BUSY_PERCENT = 0.03, 50  # of the clock; NVML utilisation at which a sample counts
BATCH_GAIN, BATCH_GAIN_MORE, BATCH_TIMES = 0.10, 0.03, 64  # least saving per token; of one more doubling; most times
UPDATES_SHARE = 0.005  # of the GPU time in optimizer kernels: a step that trains, if nothing else shows it
REPLAYED_SHARE = 0.5  # of the GPU time run by CUDA graphs: what is launched late lies outside them
LONG_PREFILL = 2048  # tokens of prompts in a batch that others decode in
HOST_CODE_SHARE, MOST_HOST_CODE = 0.02, 3  # of the step waiting for one function; functions that are reported
CACHING_OFF = 50  # of the driver's allocations in a step: the caching allocator would make none
LOOP_KERNELS = 50  # an optimizer of more kernels loops over its tensors
EAGER_KERNELS = 3.0  # kernels per call of a module that one fused kernel replaces
HOST_EAGER_SHARE = 0.1  # of a step on the CPU, in Python and in ops that only move memory
ALIGNED_ELEMENTS, ROUND_UP_TO = 8, 64  # 16 bytes of bf16: NVIDIA's matmul guide, "tensor core requirements"

# --- rules for several ranks: when they speak (judgement, unless a source is given)
UNEVEN_SHARE = 0.05  # of the step waited for ranks in turn
EXPOSED_SHARE = 0.02  # of the step in transfers that nothing hides
SMALL_COUNT, SMALL_BYTES = 8, 2**20  # collectives of a step, of less than this each
BUCKET_BYTES = 25 * 2**20  # DDP's default bucket_cap_mb

# --- rules: what the fix saves where only a trace is known
# What fused AdamW takes of foreach's time: 1.03 of 2.83 ms in the two H200 traces of tests/trace/fixtures; to fit again, compare
# the optimizer phases of `flopwise explain` on both.
FUSED_OPTIMIZER_SHARE = 0.37
FUSED_OPTIMIZER_BYTES = 28  # per parameter: weight, gradient and two moments read, three of them written, 4 bytes each
REACHED_BANDWIDTH = 0.8  # of the peak, by a kernel that streams. Judgement; kernels-2026-11.md has what ours reach
# cuDNN's time of FlashAttention-2's, forward and backward: 0.57 to 0.64 on an H200, causal, heads of 64 and 128, in
# benchmarks/results/kernels-2026-11.md; fitted again by `python benchmarks/kernels.py --only attention`.
CUDNN_SHARE = 0.62
HALF_SHARE = 0.5  # of the matmul time in bf16 or fp16: a step in half precision
EAGER_SAVED = 0.6  # of the pieces' time: each reads and writes every tensor two to three times as often. Assumed
LOSS_SAVED = 0.5  # of the loss kernels: one pass instead of two. Assumed
CHAIN_SAVED = 0.5  # of a chain beyond one kernel: half of what lies between must still be written for backward. Assumed
CAST_WRITTEN_SHARE = 0.3  # of the casts' time, to write the copies once, where the parameters are unknown. Assumed
PINNED_BYTES_PER_S = 20e9  # out of pinned memory over PCIe 4.0 with 16 lanes, 31.5 GB/s by the specification. Judgement
COMPILED_CALL_NS = 100_000.0  # the host's cost of one call of a compiled graph, without ceilings. Assumed

# --- predictions corrected by what was measured (judgement: they tell a correction from a different step)
WIDEST_CORRECTION = 3.0  # up or down
HOST_MATTERS = 0.75  # of the GPU's time: a host this busy may hold up the step
GPU_BOUND = 0.95  # of the step: the host's clock then includes its waiting for a full queue
HOST_BOUND = 0.9  # of the step spent launching: the host did not wait
# Work bound by memory draws this share of the power cap while matmuls draw more: fitted to 2.7B's steps on an H200, see
# benchmarks/results/tune-2026-11.md; `python benchmarks/tune_savings.py RUN… --again CEILINGS` shows what another value does.
MEMORY_POWER_SHARE = 0.78
LEAST_CAPPED_RATE = 0.4  # of the ceilings' rate: a slower step is not slow because of the cap alone. Judgement

# --- tune: which lever is worth measuring
WORTH_TRYING = 0.003  # of the step. Judgement: `compare` calls differences under 0.5 % none, and predictions err
WORTH_TRYING_ALONE = 0.01  # of two steps that do not fit the GPU together: their samples resolve no less
# A host busy for this share of the GPU's time makes the step vary with it: now; with the lever next in line. Judgement.
HOST_SHOWS, HOST_WOULD_SHOW = 0.4, 0.6
# Seconds to measure a lever, and to compile: an H200 machine took 30 s for 12 layers whole, 13 s for one block used by all 8
# layers (`flopwise bench --compile default|blocks` shows its setup). They order the levers, nothing else.
SECONDS_TO_TRY, SECONDS_TO_COMPILE, SECONDS_PER_LAYER, SECONDS_PER_BLOCK = 6.0, 6.0, 2.0, 10.0
UNKNOWN_LAYERS = 12  # of a user's own model

# --- tune: how levers are measured (judgement)
BUDGET_SLACK = 0.05  # of the budget, by which a tuning may end late
PAIR_MEMORY = 0.95  # of the GPU's memory, for two steps at once; if they do not fit after all, they are measured alone
FIT_MEMORY = (0.92, 0.8, 0.65)  # of it, for a step that replaces one that does not fit, until one runs
DETAILED_SAMPLES = 3  # of the first step, by phase and by the GPU's clock
WORTH_KEEPING = 0.02  # of the step: once so much is unlikely, no more processes are spent on a lever
# That one run keeps a lever that is not faster, over all that it tries: 5 %, as only one side of the interval keeps it.
# The n-th lever gets SPREAD_OUT / ((n + SPREAD_OUT) * (n + 1 + SPREAD_OUT)) of it, whose sum over any number is below 1.
TUNE_ERROR_RATE, SPREAD_OUT = 0.10, 12

# --- tune: which lever is kept
SMALLER_SHARE = 0.05  # of the peak: a lever that is not faster is kept if it saves more. Judgement
# How far a right step may be off, times what rounding was measured to do to the same step (capture/differences.py), in its
# first step; later ones amplify rounding. `python benchmarks/agreement_study.py` measures what right and wrong steps show
# (benchmarks/results/agreement-2026-11.md).
ALLOWED = {"overall": 2.0, "typical": 1.1, "weight": 3.0, "scale": 3.0, "decay": 3.0}
ALLOWED_LOSS = 5.0  # one number: what it is off by chance says little of what another step's is
ALLOWED_LATER = 2.0  # times that
