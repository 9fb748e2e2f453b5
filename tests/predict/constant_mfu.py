"""A step and a memory of a layout that are simple enough to know: for the laws of the search."""

from flopwise.records.planned import BUBBLE, MATMULS, PARTS, TENSOR, PlannedMemory, PlannedStep
from flopwise.spec.gpu import gpu
from flopwise.spec.layout import Job

MFU = 0.5


def step(job: Job) -> PlannedStep:
    """Half of the peak, a bubble, and a price for each doubling of the tensor ranks."""
    one, peak = job.layout, gpu(job.cluster.gpu).peak("bf16")
    flops = 6.0 * job.model.active_parameters() * job.tokens
    again = {"none": 0.0, "selective": 0.02, "full": 1 / 3}[one.recompute]
    matmuls = flops * (1 + again) / (peak * one.gpus * MFU)
    parts = dict.fromkeys(PARTS, 0.0) | {MATMULS: matmuls, TENSOR: 0.02 * matmuls * (one.tensor.bit_length() - 1)}
    parts[BUBBLE] = matmuls * (one.pipeline - 1) / (one.virtual * job.micro_batches)
    wall = sum(parts.values())
    mfu = flops / (wall * peak * one.gpus)
    return PlannedStep(
        wall_s=wall, parts=parts, model_flops=flops, mfu=mfu, tokens_s_gpu=job.tokens / wall / one.gpus, hidden_s={}
    )


def memory(job: Job) -> PlannedMemory:
    """Eighteen bytes a parameter, shared; activations by micro-batch."""
    one, spec = job.layout, job.model.spec
    mine, ranks = job.model.parameters() / (one.tensor * one.pipeline * one.expert), one.data * one.context
    shared = {"none": 0, "optimizer": 12, "gradients": 16, "weights": 18}[one.sharded]
    states = mine * (18 - shared + shared / ranks)
    each = {"none": 34, "selective": 26, "full": 2}[one.recompute]
    tokens = one.micro_batch * job.context / (one.context * one.tensor)
    activations = tokens * spec.d_model * each * spec.n_layers / one.pipeline * min(one.pipeline, job.micro_batches)
    owners = {"states": int(states), "activations": int(activations)}
    return PlannedMemory(peak_bytes=sum(owners.values()), owners=owners)
