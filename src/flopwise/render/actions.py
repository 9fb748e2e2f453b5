"""A lever in words: what to do, and the line of PyTorch that does it."""

from collections.abc import Mapping

from flopwise.advice.pytorch_lines import LINES
from flopwise.records.finding import Finding

_ACTIONS = {
    "graph": "Capture it in a CUDA graph",
    "compile": "Compile it",
    "precision": "Compute in {}",
    "attention": "Use {} attention",
    "optimizer": "Use the {} optimizer",
    "loss": "Use the {} loss",
    "norm": "Use {}'s normalisation",
    "activation": "Use {}'s activation",
    "rope": "Use {}'s rotary positions",
    "projections": "Join the projections that share an input",
    "overlap": "Update weights within the backward pass",
    "checkpoint": "Checkpoint activations",
}
# Of rules that no lever fixes.
_BY_HAND = {
    "repeated_casts": "Keep the weights in half precision",
    "host_syncs": "Do not wait for the GPU within the step",
    "input_stalls": "Load batches ahead of the step",
    "exposed_communication": "Overlap communication with computation",
    "exposed_transfers": "Copy from pinned memory, ahead of the step",
    "allocator_calls": "Keep memory in PyTorch's allocator",
    "cold_kernels": "Trace a warm step, or load kernels before",
    "slow_optimizer": "Use the fused optimizer",
    "zeroed_gradients": "Set gradients to None, not to zero",
    "unaligned": "Pad sizes to multiples of 64",
    "graph_breaks": "Compile it without breaks",
    "throttled": "Cool the GPU, or raise its power limit",
    "fragmentation": "Let the allocator's segments grow",
    "small_batch": "Use a larger batch",
    "decode_matmul": "Tune matmuls for few rows, or quantise weights",
    "decode_attention": "Try another attention backend, or an 8-bit cache",
    "decode_batch": "Decode more requests at a time",
    "long_prefill": "Prefill in smaller chunks",
    "ungraphed_decode": "Capture graphs for the other batch sizes",
    "cpu_data_loading": "Load batches ahead of the step",
    "cpu_double": "Compute in fp32, not in fp64",
    "cpu_optimizer": "Use the fused optimizer",
    "cpu_threads": "Let torch use more cores",
    "straggler": "Make the slowest rank as fast as the others",
    "slow_link": "Look at the slow link",
    "uneven_ranks": "Share the work out evenly",
    "small_collectives": "Use larger buckets",
    "rank_overlap": "Overlap gradients with the backward pass",
    "gathers_ahead": "Prefetch the next block's parameters",
    "sharding_group": "Shard within a host, replicate across hosts",
}


def what_to_do(finding: Finding) -> str:
    """
    >>> what_to_do(Finding(rule="launch_bound", title="t", arithmetic="", levers={"graph": "on"}))
    'Capture it in a CUDA graph'
    >>> what_to_do(Finding(rule="syncs", title="12 calls of .item() in a step", arithmetic=""))
    '12 calls of .item() in a step'
    """
    if finding.levers:
        return action(*next(iter(finding.levers.items())))
    title = finding.title.rstrip(".")
    return _BY_HAND.get(finding.rule, title[:1].upper() + title[1:])


def action(lever: str, value: str) -> str:
    """
    >>> action("precision", "bf16")
    'Compute in bf16'
    """
    return _ACTIONS.get(lever, f"Set {lever} to {{}}").format(value)


def pytorch_line(levers: Mapping[str, str], code: str = "") -> str:
    """The line of PyTorch to begin with: the lever's own, else the first of the code that is no comment.

    >>> pytorch_line({"compile": "default"}), pytorch_line({}, code="# first\\nx = 1")
    ('model = torch.compile(model, dynamic=False)', 'x = 1')
    """
    lines = (LINES.get(lever, {}).get(value, "") for lever, value in levers.items())
    written = (line for line in code.splitlines() if not line.lstrip().startswith("#"))
    return next(filter(None, lines), next(written, ""))
