"""Every case in every way, by a few processes that are started once."""

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flopwise.lm.parallel import FSDP, ShardedOptimizer

from .cases import CASES, together

Results = dict[tuple[str, str], dict[str, Any]]
KEPT = ("what a rank", "keeps")


def run_all(ranks: int, folder: Path) -> list[Results]:
    """What every rank ended with, by case and way."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", __name__])  # torch is imported once
    mp.start_processes(_rank, args=(ranks, folder), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def joined(rank: int, ranks: int, folder: Path) -> Any:
    store = dist.FileStore(str(folder / "store"), ranks)
    return dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))


def _rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    joined(rank, ranks, folder)
    results = {(name, way): together(name, way, rank, ranks) for name, case in CASES.items() for way in case.ways}
    results[KEPT] = kept()
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def kept() -> dict[str, Any]:
    """Of weights and of the optimizer's state, between steps."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size)) for size in (9, 2, 7, 4, 5)]
    optimizer = ShardedOptimizer(weights, torch.optim.AdamW)
    torch.cat(weights).square().sum().backward()
    optimizer.step()
    wrap = FSDP(CASES["tiny"].model())
    return {
        "weights": {name: p.numel() for name, p in wrap.module.named_parameters()},
        "gathered": sum(unit.whole is not None for unit in wrap.units),
        "state": optimizer.state_dict()["state"],
        "groups": optimizer.state_dict()["param_groups"],
    }
