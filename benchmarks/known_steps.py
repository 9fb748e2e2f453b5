"""Steps of a known amount of work, for `benchmarks/verdicts.py`: `base`, and the same with 1, 3 and 10 % added."""

from collections.abc import Callable

import torch

PIECES = 300


def _host_bound(device: torch.device, pieces: int) -> Callable[[], object]:
    """Small operations: on a GPU the host launches all the time; on a CPU one core works."""
    x = torch.ones(64, 64, device=device) / 64

    def step() -> object:
        y = x
        for _ in range(pieces):
            y = y @ x
        return y

    return step


def _gpu_bound(device: torch.device, pieces: int) -> Callable[[], object]:
    """Large products, one tenth as many."""
    x = torch.full((2048, 2048), 1 / 2048, device=device, dtype=torch.bfloat16)

    def step() -> object:
        y = x
        for _ in range(pieces):
            y = y @ x
        return y

    return step


def _captured(device: torch.device, pieces: int) -> Callable[[], object]:
    """The small operations as a CUDA graph."""
    step = _host_bound(device, pieces)
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _made(build: Callable[[torch.device, int], Callable[[], object]], more: float) -> Callable[[torch.device], object]:
    return lambda device: build(device, round(PIECES * (1 + more)))


host, host_1, host_3, host_10 = (_made(_host_bound, more) for more in (0, 0.01, 0.03, 0.10))
gpu, gpu_1, gpu_3, gpu_10 = (_made(_gpu_bound, more) for more in (0, 0.01, 0.03, 0.10))
captured, captured_1, captured_3, captured_10 = (_made(_captured, more) for more in (0, 0.01, 0.03, 0.10))


def no_lever(device: torch.device) -> Callable[[], object]:
    """Whole numbers, no module, no optimizer: no lever changes what is computed, or how."""
    x = torch.arange(2**16, device=device)

    def step() -> object:
        y = x
        for _ in range(40):
            y = torch.cumsum(y, 0) // 3
        return y

    return step
