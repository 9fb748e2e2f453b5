"""A collective as a step: this rank's part of it, by torch.distributed."""

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from flopwise import units
from flopwise.capture.memory_limit import free_bytes
from flopwise.capture.model_step import check_supported
from flopwise.capture.step import Step
from flopwise.errors import Unsupported, WrongResult
from flopwise.lm.precision import on_fake_tensors, torch_dtype
from flopwise.lm.ranks import Ranks, backend_named, ranks_here
from flopwise.records.run import STEP, Ran
from flopwise.spec.dtypes import named
from flopwise.spec.operations import OpSpec, message_bytes
from flopwise.spec.workload import Workload

_BOUND = 0.02  # relative, of a sum over ranks in bf16


def collective_step(workload: Workload, device: torch.device) -> Step:
    """What it computes is checked once, with numbers that say which rank they come from; then they are random."""
    op, ranks = cast(OpSpec, workload.subject), ranks_here()
    if on_fake_tensors():
        raise Unsupported(f"{workload.target} is done by several ranks, and a dry run is one process", "use bench")
    check_supported(workload.recipe, device)
    item = named(workload.recipe.precision).n_bytes
    count = message_bytes(op, ranks.world, item) // item
    sent_count, received_count = _counts(op.name, count, ranks.world)
    _check_memory(item * (sent_count + received_count), ranks, device)
    sent = torch.empty(sent_count, dtype=torch_dtype(workload.recipe.precision), device=device)
    received = sent.new_empty(received_count) if received_count else sent
    run = _call(op.name, sent, received, ranks)
    sent.fill_(ranks.rank + 1)
    run()
    check_received(op.name, received, ranks)
    sent.normal_()

    def align() -> None:
        if op.name == "all-reduce":
            sent.mul_(1 / ranks.world)  # which is summed again and again
        dist.barrier()

    def ran() -> Ran:
        return Ran(device=str(device), backend=backend_named(ranks, device, op.impl))

    return Step(phases={STEP: run}, ran=ran, align=align)


def _counts(name: str, count: int, world: int) -> tuple[int, int]:
    """Elements that a rank sends and receives, of which the larger is `count`; 0: it receives into what it sends."""
    shares = {"all-reduce": (1, 0), "all-gather": (world, 1), "reduce-scatter": (1, world)}
    sent, received = shares.get(name, (1, 1))
    return count // sent, count // received if received else 0


def _check_memory(rank_bytes: int, ranks: Ranks, device: torch.device) -> None:
    """An absurd size must not wake the system's OOM killer."""
    shared_by = ranks.local_world if device.type == "cpu" else -(-ranks.local_world // torch.cuda.device_count())
    free = free_bytes(device)
    if free is not None and rank_bytes * shared_by > free:
        needed = f"{units.size(rank_bytes * shared_by)} for the buffers of {units.several(shared_by, 'rank')}"
        raise Unsupported(f"{device.type} has {units.size(free)} free, and it takes {needed}", "give fewer bytes")
    dist.barrier()  # all have looked before one takes its own


def _call(name: str, sent: Tensor, received: Tensor, ranks: Ranks) -> Callable[[], object]:
    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(sent),
        "all-gather": lambda: dist.all_gather_into_tensor(received, sent),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(received, sent),
        "all-to-all": lambda: dist.all_to_all_single(received, sent),
        "send-recv": lambda: _ring(sent, received, ranks),
    }
    return calls[name]


def _ring(sent: Tensor, received: Tensor, ranks: Ranks) -> None:
    """Every rank sends to the next one. A rank alone copies: torch sends nothing to itself."""
    if ranks.world == 1:
        received.copy_(sent)
        return
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]):
        work.wait()


def check_received(name: str, received: Tensor, ranks: Ranks) -> None:
    """Raise unless a rank received what it should, where every rank sent its number, from 1 on.

    >>> check_received("all-gather", torch.tensor([1.0, 1.0, 2.0, 2.0]), Ranks(world=2))
    >>> check_received("all-reduce", torch.tensor([3.0, 3.0]), Ranks(world=2))
    """
    n = ranks.world
    expected = [n * (n + 1) / 2]
    if name in ("all-gather", "all-to-all"):
        expected = [float(rank + 1) for rank in range(n)]
    elif name == "send-recv":
        expected = [float((ranks.rank - 1) % n + 1)]
    ends = received.view(len(expected), -1)[:, [0, -1]].double().cpu()
    error = (ends / torch.tensor(expected, dtype=torch.double)[:, None] - 1).abs().max().item()
    if not error <= _BOUND:
        text = f"rank {ranks.rank} received {ends.tolist()} from op:{name}, and expected {expected}"
        raise WrongResult(text, "it was not timed: please report it with this machine's `flopwise doctor`")
