"""The messages between a worker and the process that started it: events one way, requests the other, one JSON line each."""

from typing import Any

import msgspec

from flopwise.records.ceilings import Probe
from flopwise.records.experiment import Place
from flopwise.records.prediction import DryRun
from flopwise.records.run import Agreement, Environment, PhaseMemory, Ran, RankRow
from flopwise.spec.workload import Trial, Workload


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    pass


class WorkerReady(_Event, frozen=True, kw_only=True):
    """The worker is up; `error` says why it can do nothing."""

    error: str = ""
    hint: str = ""


class Started(_Event, frozen=True, kw_only=True):
    """The child process of a request is running."""

    pid: int


class DeviceInfo(_Event, frozen=True, kw_only=True):
    environment: Environment
    device: str
    gpu_uuid: str = ""  # for telemetry; not stored
    free_bytes: int | None = None  # of the device's memory; None: unknown


class StepBuilt(_Event, frozen=True, kw_only=True):
    """The workload is built (and its CUDA graph captured)."""

    setup_ns: int
    captured_first_ns: int = 0


class WarmedUp(_Event, frozen=True, kw_only=True):
    rule: str
    clock_ns: int = 0  # that a step which does nothing takes; 0: not known
    cores: float = 0.0  # the host's processor time for a second of it, beyond the first step; 0: not known


class WarmupStep(_Event, frozen=True, kw_only=True):
    wall_ns: int


class PhaseSample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the three clocks; `gpu_ns` and `launch_ns` are None where there is no GPU."""

    wall_ns: int
    launch_ns: int | None = None
    gpu_ns: int | None = None
    held: bool = False


class Sampled(_Event, frozen=True, kw_only=True):
    """One round: every phase once, the whole step first."""

    phases: dict[str, PhaseSample]


class MemoryMeasured(_Event, frozen=True, kw_only=True):
    memory: tuple[PhaseMemory, ...]


class RanksMeasured(_Event, frozen=True, kw_only=True):
    """What each of several ranks measured, by rank."""

    ranks: tuple[RankRow, ...]


class Tracing(_Event, frozen=True, kw_only=True):
    """The samples are taken; another program now traces the step in a separate process."""

    profiler: str


class TraceWritten(_Event, frozen=True, kw_only=True):
    """Some steps ran under a profiler, which wrote its file."""

    path: str
    step_ns: int  # per traced step: compared with the untraced step, it gives the profiler's overhead


class SnapshotWritten(_Event, frozen=True, kw_only=True):
    """Some steps' allocations were recorded: the snapshot's file, and next to it what is known of each."""

    path: str


class AgreementResult(_Event, frozen=True, kw_only=True):
    """A few steps' losses and gradients compared with the reference's; or the reason why they could not be."""

    agreement: Agreement | None = None
    failed: str = ""


class DryRunResult(_Event, frozen=True, kw_only=True):
    """A step was run on fake tensors; or, of several that were asked for, one could not be."""

    run: DryRun | None


class PairCompared(_Event, frozen=True, kw_only=True):
    """One more pair of processes was measured against each other: what is known so far."""

    pairs: int
    ratio: float  # of the second's time to the first's
    left_s: float  # until no further pair is begun


class ProbeMeasured(_Event, frozen=True, kw_only=True):
    """One of the machine's limits was measured."""

    probe: Probe
    n: int  # of `of`
    of: int


class ExperimentProgress(_Event, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of an experiment; one of the three is there."""

    place: Place | None = None
    doing: str = ""
    row: dict[str, Any] | None = None


class Done(_Event, frozen=True, kw_only=True):
    """The trial has ended: how, and why."""

    status: str
    reason: str = ""
    hint: str = ""
    levers: tuple[str, ...] = ()  # that are to blame, where it is known
    stopped: str = ""
    ran: Ran | None = None
    peak_rss_bytes: int = 0


class Exited(_Event, frozen=True, kw_only=True):
    """The child process is gone: `code` is its exit code, or minus the signal that ended it."""

    code: int


_Measuring = Started | DeviceInfo | StepBuilt | WarmupStep | WarmedUp | Sampled | MemoryMeasured | Done | Exited
_Results = (
    RanksMeasured
    | Tracing
    | TraceWritten
    | SnapshotWritten
    | AgreementResult
    | DryRunResult
    | ProbeMeasured
    | PairCompared
    | ExperimentProgress
)
Event = WorkerReady | _Measuring | _Results


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


class AgreementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Losses and gradients of a few steps instead of their times: written to a file, or compared with that file."""

    path: str  # the reference's, a .npz file
    write: bool = False
    precisions: tuple[str, ...] = ()  # of a reference: those that steps to be compared with it may have
    levers: dict[str, str] = {}  # of a reference: which of these can the step not have


class NsysJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the process under nsys is asked to do, in a file: pipes do not pass through nsys."""

    trial: Trial
    trace: TraceRequest
    events: str  # the file for its events, one line each
    key: str  # of their digests
    timeout_s: float


class ExperimentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which experiment to run, and how."""

    experiment: str
    device: str = "auto"
    quick: bool = False
    workload: Workload | None = None
    folder: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked to do. With none of trial, dry and experiment: report the device."""

    trial: str = ""  # JSON of a Trial
    dry: tuple[str, ...] = ()  # JSON of Workloads to run on fake tensors, one after the other
    architecture: str = ""  # of the GPU that the fake tensors stand for
    experiment: ExperimentRequest | None = None
    calibrate: bool = False  # measure the device's limits
    device: str = "auto"
    log: str = ""
    key: str = ""  # of the digests of the events that answer it
    trace: TraceRequest | None = None
    memory: MemoryRequest | None = None
    agree: AgreementRequest | None = None  # instead of timing the trial
    compare: AgreementRequest | None = None  # the trial's first steps, which also warm it up
    turns: bool = False  # interleaved with other trials: wait for a line before every round, `go` or `stop`
    fewest: int = 0  # samples to take whatever the budget
    details: int = 0  # samples with phases and GPU time, before those of the whole step alone; 0: all
    watch: bool = True  # after the samples, one more step op by op, where no formula says what it does
