"""What a worker tells the process that started it, one JSON line each, in the order it happens."""

from typing import Any

import msgspec

from flopwise.records.ceilings import Probe
from flopwise.records.experiment import Place
from flopwise.records.prediction import DryRun
from flopwise.records.run import Agreement, Environment, PhaseMemory, Ran
from flopwise.spec.workload import Trial, Workload


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    pass


class Hello(_Event, frozen=True, kw_only=True, tag="hello"):
    """The worker is up; `error` says why it can do nothing."""

    error: str = ""
    hint: str = ""


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """A process of its own has begun with the trial."""

    pid: int


class Surroundings(_Event, frozen=True, kw_only=True, tag="surroundings"):
    environment: Environment
    device: str
    gpu_uuid: str = ""  # to watch it by; not kept
    free_bytes: int | None = None  # of the device's memory; None: not known


class Ready(_Event, frozen=True, kw_only=True, tag="ready"):
    """The workload is built (and its CUDA graph captured)."""

    setup_ns: int
    captured_first_ns: int = 0


class WarmedUp(_Event, frozen=True, kw_only=True, tag="warmed-up"):
    rule: str


class WarmupStep(_Event, frozen=True, kw_only=True, tag="warmup-step"):
    wall_ns: int


class PhaseSample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the three clocks; `gpu_ns` and `launch_ns` are None where there is no GPU."""

    wall_ns: int
    launch_ns: int | None = None
    gpu_ns: int | None = None
    held: bool = False


class Sampled(_Event, frozen=True, kw_only=True, tag="sampled"):
    """One round: every phase once, the whole step first."""

    phases: dict[str, PhaseSample]


class MemoryMeasured(_Event, frozen=True, kw_only=True, tag="memory-measured"):
    memory: tuple[PhaseMemory, ...]


class Tracing(_Event, frozen=True, kw_only=True, tag="tracing"):
    """The samples are taken; another program now traces the step in a process of its own."""

    profiler: str


class Traced(_Event, frozen=True, kw_only=True, tag="traced"):
    """Some steps ran under a profiler, which wrote its file."""

    path: str
    step_ns: int  # per traced step: beside the untraced step, it tells the profiler's overhead


class Recorded(_Event, frozen=True, kw_only=True, tag="recorded"):
    """Some steps' allocations were recorded: a snapshot, and beside it what is known of each."""

    path: str


class Agreed(_Event, frozen=True, kw_only=True, tag="agreed"):
    """A few steps' losses and gradients were set beside the reference's; or could not be, and `failed` says why."""

    agreement: Agreement | None = None
    failed: str = ""


class Dried(_Event, frozen=True, kw_only=True, tag="dried"):
    """A step was run on fake tensors."""

    run: DryRun


class Probed(_Event, frozen=True, kw_only=True, tag="probed"):
    """One of the machine's limits was measured."""

    probe: Probe
    n: int  # of `of`
    of: int


class ExperimentTold(_Event, frozen=True, kw_only=True, tag="experiment", omit_defaults=True):
    """Progress of an experiment; one of the three is there."""

    place: Place | None = None
    doing: str = ""
    row: dict[str, Any] | None = None


class Done(_Event, frozen=True, kw_only=True, tag="done"):
    """The trial has ended, for better or worse."""

    status: str
    reason: str = ""
    hint: str = ""
    stopped: str = ""
    ran: Ran | None = None
    peak_rss_bytes: int = 0


class Exited(_Event, frozen=True, kw_only=True, tag="exited"):
    """The trial's process is gone: `code` is its exit code, or minus the signal that ended it."""

    code: int


Event = (
    Tracing
    | Traced
    | Recorded
    | Agreed
    | Dried
    | Probed
    | ExperimentTold
    | Hello
    | Started
    | Surroundings
    | Ready
    | WarmedUp
    | WarmupStep
    | Sampled
    | MemoryMeasured
    | Done
    | Exited
)


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to trace, once the samples are taken."""

    path: str
    steps: int = 2
    shapes: bool = True
    stacks: bool = False
    memory: bool = False
    modules: bool = True


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Record the allocator's history over some steps, instead of timing them."""

    path: str  # of the snapshot
    steps: int = 3
    stacks: str = "python"  # one of memory_record.STACKS


class AgreeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Follow a few steps' losses and gradients instead of timing them: write them down, or compare with what is written."""

    path: str  # of the reference's, a .npz file
    write: bool = False


class NsysJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the process under nsys is asked to do, in a file: pipes do not pass through nsys."""

    trial: Trial
    trace: TraceRequest
    events: str  # the file its events go to, one JSON line each
    timeout_s: float


class ExperimentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which experiment to run, and how."""

    experiment: str
    device: str = "auto"
    quick: bool = False
    workload: Workload | None = None
    folder: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked to do. Without a trial: say what there is to say about the device."""

    trial: str = ""  # JSON of a Trial
    dry: str = ""  # JSON of a Workload: run it on fake tensors
    architecture: str = ""  # of the GPU that the fake tensors stand for
    experiment: ExperimentRequest | None = None
    calibrate: bool = False  # measure the device's limits
    device: str = "auto"
    log: str = ""
    trace: TraceRequest | None = None
    memory: MemoryRequest | None = None
    agree: AgreeRequest | None = None  # instead of timing the trial
    compare: AgreeRequest | None = None  # with the trial's first steps, which warm it up as well
    turns: bool = False  # wait for a line before every round: `go` or `stop`
    fewest: int = 0  # samples to be taken whatever the sampling's budget says
    details: int = 0  # samples with each phase's and the GPU's time; those after them have the step's alone. 0: all
