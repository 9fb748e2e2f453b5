"""A step: named phases that are run in order, again and again; and the same step captured in a CUDA graph."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flopwise.errors import FlopwiseError, Unsupported, one_line
from flopwise.records.run import STEP, Ran

GRAPH_WARMUPS = 3  # on a side stream, before capture: lazy initialisation must not be captured
# Until a compiler's own CUDA graphs replay: a first step may be eager, one compiles, one records.
RECORDING_STEPS = 4


@dataclass(frozen=True)
class Step:
    """Phases in the order they run, and a report of what really ran."""

    phases: dict[str, Callable[[], object]]
    ran: Callable[[], Ran]
    single_op: bool = False  # then the L2 cache is flushed between samples
    captured_peak_bytes: int = 0  # a graph's memory is taken while it is captured; replays allocate nothing
    captured_first_ns: int = 0  # what the first run took beyond a later one: compilation, if asked for
    model: nn.Module | None = None  # a trace names its modules
    optimizers: Sequence[torch.optim.Optimizer] = ()  # of flopwise's own models
    before_replay: Callable[[], object] | None = None  # host work that a CUDA graph cannot hold (the learning rate)
    trained: nn.Module | None = None  # holds the gradients after a step, compiled or not
    weights: Callable[[], Sequence[nn.Parameter]] = tuple  # all that were built, of which a user's step may use some
    loss: Callable[[], Tensor | None] = lambda: None  # the last step's
    exact_weight: Callable[[Tensor], Tensor] = lambda weight: weight.detach()  # with what an optimizer keeps of it
    one_callable: bool = False  # of the user's own: its phases are found as it runs
    uncaptured: dict[str, Callable[[], object]] | None = None  # of a CUDA graph: what was captured
    align: Callable[[], object] | None = None  # before each timing and no part of it: ranks begin together
    loss_scale: Callable[[], float] = lambda: 1.0  # of the next step's gradients
    linear: str = ""  # of a user's own model: how many linear layers are in fp8, and which are not


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was queued; on the CPU nothing is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture_failure(error: RuntimeError) -> Exception:
    """What a failed capture raises: its end hides what failed in it, which is the first error of the chain."""
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    if isinstance(first, torch.OutOfMemoryError | MemoryError | FlopwiseError):
        return first
    return Unsupported(
        f"graph = 'on': the step cannot be captured in a CUDA graph: {one_line(str(first), 160)}",
        "a captured step must not read numbers on the host (.item(), print), copy from the CPU, or change its shapes",
        ("graph",),
    )


def recorded(
    step: Step, device: torch.device, once: Callable[[Callable[[], object]], object] = lambda run: run()
) -> Step:
    """The step once the compiler has recorded CUDA graphs of its own, and the peak until then: replays allocate nothing."""
    took_ns: list[int] = []

    def run() -> None:
        begun = time.perf_counter_ns()
        for phase in step.phases.values():
            phase()
        synchronise(device)
        took_ns.append(time.perf_counter_ns() - begun)

    once(run)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(RECORDING_STEPS - 1):
        once(run)
    peak = torch.cuda.max_memory_allocated(device)
    return replace(step, captured_peak_bytes=peak, captured_first_ns=max(took_ns) - took_ns[-1])


def captured(
    step: Step, device: torch.device, once: Callable[[Callable[[], object]], object] = lambda run: run()
) -> Step:
    """The whole step as one CUDA graph: one launch, whatever the number of kernels. `once` runs a step of its warm-up."""

    def run() -> None:
        for phase in step.phases.values():
            phase()

    prepare = step.before_replay or (lambda: None)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        took_ns: list[int] = []

        def warm_up() -> None:
            begun = time.perf_counter_ns()
            prepare()
            run()
            torch.cuda.synchronize(device)
            took_ns.append(time.perf_counter_ns() - begun)

        for _ in range(GRAPH_WARMUPS):
            once(warm_up)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.reset_peak_memory_stats(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        raise capture_failure(error) from error

    def replay() -> None:
        prepare()
        graph.replay()

    def loss() -> Tensor | None:
        last = step.loss()
        return last if last is not None and last.is_cuda else None  # a replay changes no number of the host's

    peak = torch.cuda.max_memory_allocated(device)
    return Step(
        phases={STEP: replay},
        ran=lambda: step.ran(),  # and so the step stays, whose tensors the graph uses
        single_op=step.single_op,
        captured_peak_bytes=peak,
        captured_first_ns=took_ns[0] - took_ns[-1],
        trained=step.trained,
        weights=step.weights,
        exact_weight=step.exact_weight,
        loss=loss,
        uncaptured=step.phases,
    )
