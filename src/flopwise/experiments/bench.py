"""What an experiment measures with: a device and a clock that is right. [torch]

A time is of synchronised work, after a warm-up that is not counted, and the median of several samples. On a GPU three clocks
are read (see `capture/clock.py`); on the CPU only the wall clock has a meaning.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from flopwise.capture.clock import clock_for
from flopwise.capture.step import synchronise
from flopwise.errors import Unsupported
from flopwise.experiments.experiment import Row
from flopwise.records.events import PhaseSample
from flopwise.records.run import STEP
from flopwise.spec.workload import Workload
from flopwise.statistics import FEWEST, estimate

Run = Callable[[], object]

_SAMPLE_NS = 200_000  # a sample of less is of several runs: the clock's own cost must not show
_MOST_REPEATS = 256  # of a run in a sample: the driver's queue must hold all their launches
_MOST_SAMPLES = 500
_RAISE_CLOCKS_NS = 200_000_000  # of running before the first time on a GPU: it raises its clocks within that
_OVERRUN = 4  # times the budget that six samples of something slow may take


@dataclass(frozen=True)
class Timing:
    """Nanoseconds per run: medians, and the 95 % interval of the wall clock's."""

    wall_ns: float
    wall_low_ns: float
    wall_high_ns: float
    launch_ns: float | None  # until the host was free again; None on the CPU
    gpu_ns: float | None  # of the GPU alone; None on the CPU
    gpu_exact: bool  # all work was queued before it began; else gpu_ns holds waits for the host, too
    samples: int
    repeats: int  # runs in a sample

    @property
    def device_ns(self) -> float:
        """What the device needs, launches not counted: the GPU's clock, or on the CPU the wall's."""
        return self.wall_ns if self.gpu_ns is None else self.gpu_ns

    def row(self) -> Row:
        """For a row: `{"n": n, **timing.row()}`."""
        return dict(vars(self))


class Bench:
    """A device, whether to be quick, and a clock. `workload` is what --workload named, if the experiment takes it."""

    def __init__(
        self,
        device: torch.device,
        quick: bool = False,
        workload: Workload | None = None,
        folder: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.device, self.quick, self.workload = device, quick, workload
        self._folder = folder or Path()
        self._tell = tell
        self._cold = device.type == "cuda"

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def doing(self, text: str) -> None:
        """What is measured now, for who watches."""
        self._tell(text)

    def file(self, name: str) -> Path:
        """Where a raw file, such as a trace, belongs: it is kept with the run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / name

    def synchronise(self) -> None:
        synchronise(self.device)

    def needs_gpu(self, what: str) -> None:
        """Raise where there is no GPU: the experiment's row then says 'not measurable here', with this line."""
        if not self.on_gpu:
            raise Unsupported(f"{what} needs a GPU, and this ran on the CPU", "--device cuda, where there is one")

    def once_ns(self, run: Run) -> int:
        """Wall time of one run, synchronised before and after; no warm-up."""
        self.synchronise()
        begun = time.perf_counter_ns()
        run()
        self.synchronise()
        return time.perf_counter_ns() - begun

    def time(self, run: Run, *, seconds: float | None = None, repeats: int | None = None) -> Timing:
        """Time a run; it should leave no more than it found, and read nothing on the host.

        `repeats` runs make a sample, one after the other without waiting between them; without it, as many as make a
        sample long enough to be read exactly. With repeats=1, each run is waited for.
        """
        budget_s = seconds if seconds is not None else (0.05 if self.quick else 0.3)
        one_ns = self._warm(run)
        many = repeats or max(1, min(_MOST_REPEATS, int(_SAMPLE_NS // max(1, one_ns)) + 1))

        def runs() -> None:
            for _ in range(many):
                run()

        clock = clock_for({STEP: runs}, self.device, single_op=False)
        samples: list[PhaseSample] = []
        collects = gc.isenabled()
        gc.disable()  # a collection in the middle of a run is the interpreter's, not the run's
        try:
            clock.once()
            begun = time.perf_counter()
            while _more(len(samples), time.perf_counter() - begun, budget_s):
                samples.append(clock.sample()[STEP])
        finally:
            if collects:
                gc.enable()
        walls = estimate([sample.wall_ns / many for sample in samples])
        return Timing(
            wall_ns=walls.median,
            wall_low_ns=walls.median if walls.low is None else walls.low,
            wall_high_ns=walls.median if walls.high is None else walls.high,
            launch_ns=median(sample.launch_ns or 0 for sample in samples) / many if self.on_gpu else None,
            gpu_ns=median(sample.gpu_ns or 0 for sample in samples) / many if self.on_gpu else None,
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
            if took[-1] > 1e9:  # so slow that its warm-up no longer shows
                break
        return min(first_ns, median(took))


def _more(n: int, elapsed_s: float, budget_s: float) -> bool:
    if n < 2:
        return True
    if n < FEWEST:
        return elapsed_s < _OVERRUN * budget_s
    return elapsed_s < budget_s and n < _MOST_SAMPLES
