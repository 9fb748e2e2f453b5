"""What an experiment measures with: a device and a correct clock. [torch]

A time is of synchronised work, after a warm-up that is not counted, and the median of several samples. On a GPU three clocks
are read (see `capture/clock.py`); on the CPU only the wall clock has a meaning.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flopwise.capture.clock import clock_for
from flopwise.capture.kineto import trace_steps
from flopwise.capture.memory_limit import free_bytes
from flopwise.capture.step import Step, synchronise
from flopwise.collector import no_collector
from flopwise.errors import Unsupported
from flopwise.experiments.rows import Timed
from flopwise.kernels import nvrtc
from flopwise.lm.precision import apply_fp32_matmul, torch_dtype
from flopwise.records.events import PhaseSample, TraceRequest
from flopwise.records.run import STEP, Ran
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload
from flopwise.statistics import FEWEST, estimate

Run = Callable[[], object]

_SAMPLE_NS = 200_000  # a sample of shorter work has several runs, so that the clock's own cost does not show
_MOST_REPEATS = 256  # runs in a sample: the driver's queue must hold all their launches
_MOST_SAMPLES = 500
_RAISE_CLOCKS_NS = 200_000_000  # work before the first time on a GPU: it raises its clocks within that
_OVERRUN = 4  # times the budget that six samples of something slow may take
_SLOW_NS = 1e9  # a run so slow that its warm-up no longer shows


class Bench:
    """A device, whether to be quick, and a clock. `workload` is what --workload named, if the experiment takes it."""

    def __init__(
        self,
        device: torch.device,
        quick: bool = False,
        workload: Workload | None = None,
        folder: Path | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.device, self.quick, self.workload = device, quick, workload
        self.doing = on_progress  # called with what is measured now
        self._folder = folder or Path()
        self._cold = self.on_gpu

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def chip(self) -> Any:
        """The GPU's properties."""
        return torch.cuda.get_device_properties(self.device)

    def file(self, name: str) -> Path:
        """Where a raw file, such as a trace, belongs: it is kept with the run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name

    def synchronise(self) -> None:
        synchronise(self.device)

    def needs_gpu(self, what: str) -> None:
        """Raise where there is no GPU: the experiment is then 'not measurable here', with this line."""
        if not self.on_gpu:
            raise Unsupported(f"{what} needs a GPU, and this ran on the CPU", "--device cuda, where there is one")

    def randn(self, *sizes: int, dtype: str = "fp32", **more: Any) -> Tensor:
        """Random numbers on the device."""
        return torch.randn(sizes, device=self.device, dtype=torch_dtype(dtype), **more)

    def fp32_matmul(self, precision: str = "fp32") -> None:
        """From here on fp32 matmuls compute in fp32, or if asked for in TF32."""
        apply_fp32_matmul(Recipe(precision=precision))

    def cuda_kernels(self, source: str, name: str, kernels: Sequence[str], **defines: int) -> list[nvrtc.Function]:
        """Kernels of a CUDA source, compiled for this GPU with these constants defined."""
        options = [f"-D{key}={value}" for key, value in defines.items()]
        return nvrtc.load(source, name, kernels, self.device.index or 0, options)

    def trace(self, phases: Mapping[str, Run], name: str, steps: int = 1) -> Path:
        """A Kineto trace of some steps, kept with the run."""
        path = self.file(name)
        step = Step(phases=dict(phases), ran=lambda: Ran(device=str(self.device)))
        trace_steps(step, self.device, TraceRequest(path=str(path), steps=steps))
        return path

    def free_bytes(self) -> float:
        """The memory that is free on the device, the allocator's cache included."""
        if self.on_gpu:
            torch.cuda.empty_cache()
        free = free_bytes(self.device)
        return float("inf") if free is None else free

    def once_ns(self, run: Run) -> int:
        """Wall time of one run, synchronised before and after; no warm-up."""
        self.synchronise()
        begun = time.perf_counter_ns()
        run()
        self.synchronise()
        return time.perf_counter_ns() - begun

    def time(self, run: Run, *, seconds: float | None = None, repeats: int | None = None) -> Timed:
        """Time a run; it must free what it allocates, and read nothing on the host.

        `repeats` runs make a sample, one after the other without waiting between them; without it, as many as make a
        sample long enough to be read exactly. With repeats=1, each run is waited for.
        """
        budget_s = seconds if seconds is not None else (0.05 if self.quick else 0.3)
        one_ns = self._warm(run)
        many = repeats or max(1, min(_MOST_REPEATS, int(_SAMPLE_NS // max(1, one_ns)) + 1))

        def runs() -> None:
            for _ in range(many):
                run()

        return self._timed(self._samples(runs, budget_s), many)

    def _samples(self, run: Run, budget_s: float) -> list[PhaseSample]:
        clock = clock_for({STEP: run}, self.device, single_op=False)
        samples: list[PhaseSample] = []
        with no_collector():  # a collection in the middle of a run is the interpreter's work, not the run's
            clock.once()
            begun = time.perf_counter()
            while _more(len(samples), time.perf_counter() - begun, budget_s):
                samples.append(clock.sample()[STEP])
        return samples

    def _timed(self, samples: list[PhaseSample], many: int) -> Timed:
        walls = estimate([sample.wall_ns / many for sample in samples])

        def gpu_clock(name: str) -> float | None:
            return median(getattr(sample, name) or 0 for sample in samples) / many if self.on_gpu else None

        return Timed(
            wall_ns=walls.median,
            wall_low_ns=walls.median if walls.low is None else walls.low,
            wall_high_ns=walls.median if walls.high is None else walls.high,
            launch_ns=gpu_clock("launch_ns"),
            gpu_ns=gpu_clock("gpu_ns"),
            gpu_exact=self.on_gpu and all(sample.held for sample in samples[1:]),
            samples=len(samples),
            repeats=many,
        )

    def graphed(self, run: Run) -> Run:
        """The run as a CUDA graph; it must be one that can be captured."""
        self.needs_gpu("a CUDA graph")
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def peak_bytes(self, run: Run) -> int | None:
        """The most that the GPU's allocator held during a run beyond what it held before; None on the CPU, which has none."""
        if not self.on_gpu:
            return None
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.synchronise()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _warm(self, run: Run) -> float:
        """Run until it is warm; nanoseconds per run then."""
        least_ns = _RAISE_CLOCKS_NS if self._cold else (2_000_000 if self.quick else 20_000_000)
        self._cold = False
        first_ns = self.once_ns(run)  # compiles, allocates
        took: list[float] = []
        begun = time.perf_counter_ns()
        while len(took) < 2 or (time.perf_counter_ns() - begun < least_ns and len(took) < 10_000):
            took.append(self.once_ns(run))
            if took[-1] > _SLOW_NS:
                break
        return min(first_ns, median(took))


@contextmanager
def one_thread(bench: Bench) -> Iterator[None]:
    """On the CPU, one thread: large operations would otherwise run on all cores and small ones on one, and hide any law."""
    threads = torch.get_num_threads()
    if not bench.on_gpu:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _more(n: int, elapsed_s: float, budget_s: float) -> bool:
    if n < 2:
        return True
    if n < FEWEST:
        return elapsed_s < _OVERRUN * budget_s
    return elapsed_s < budget_s and n < _MOST_SAMPLES
