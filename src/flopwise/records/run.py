"""What is stored: frozen structs with a schema version; times are integers of nanoseconds, sizes of bytes."""

import itertools
from typing import Generic, TypeVar

import msgspec

from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Trial

SCHEMA = 1

OK, OOM, CRASH, TIMEOUT = "ok", "oom", "crash", "timeout"
UNSUPPORTED, ERROR, INTERRUPTED, WRONG = "unsupported", "error", "interrupted", "wrong result"
LOST = "lost"  # the cluster's worker or node went away, again and again: nothing is known of the step
UNMEASURED = (INTERRUPTED, LOST)  # a resumed run measures these again
STEP = "step"  # the name of the whole step among its phases
WRITTEN_OUT = "written out"  # attention as two matmuls with a softmax between them, by the step's own code


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding ignores fields it does not know, so that an older flopwise reads a newer run."""


class Gpu(_Record, frozen=True, kw_only=True):
    """The GPU a point ran on, as the driver describes it."""

    name: str
    memory_bytes: int
    sm_count: int
    l2_bytes: int
    capability: str
    driver: str = ""


class Environment(_Record, frozen=True, kw_only=True):
    """Where a point was measured. No user name, no environment variables beyond the ones that change speed; a host name of a
    cluster's node alone.
    """

    flopwise: str
    python: str
    torch: str
    cuda: str = ""
    triton: str = ""
    os: str = ""
    cpu: str = ""
    cpu_cores: int = 0
    cpu_threads: int = 0  # that torch uses
    local_ranks: int = 1  # processes of the same job on this machine, which share its cores
    gpu: Gpu | None = None
    git_commit: str = ""  # of the working directory
    git_dirty: bool = False
    switches: dict[str, str] = {}  # variables that change speed and were set (NVIDIA_TF32_OVERRIDE…)
    host: str = ""  # of a cluster, which of its nodes


class SeenOptimizer(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """An optimizer whose step was watched."""

    name: str  # its class
    form: str = ""  # by its ops: 'loop', 'foreach', 'fused' or 'flopwise'; '': of a class that has no such forms
    by_torch: bool = False  # a class of torch.optim
    updates: str = ""  # dtype of most of what it updates
    capturable: bool = False  # in a CUDA graph


class Seen(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did, read from its ops: in a step of its own, after all others, that is not timed.

    FLOPs are those of matmuls, convolutions and attention. What is compiled is run op by op for it.
    """

    flops: dict[str, int] = {}  # by dtype (fp32, tf32, bf16, fp16, fp8): all that forward and backward do
    useful_flops: int = 0  # of these, the model's own: nothing that is computed again
    recomputed_flops: int = 0  # of a checkpoint that runs forward again
    parameters: int | None = None  # that it computes with; None: not known
    weights: str = ""  # the dtype of most of them
    tokens: int = 0  # looked up in the vocabulary; 0: the step has none
    attention: tuple[str, ...] = ()  # SDPA's backends ('flash', 'cudnn', 'efficient', 'math'), WRITTEN_OUT, …
    optimizers: tuple[SeenOptimizer, ...] = ()
    autocast: str = ""  # the dtype of autocast, where it was on
    compiled: str = ""  # 'model', 'blocks', or 'parts': less than half of it; '': nothing
    checkpoints: int = 0  # segments that were computed again
    replays: int = 0  # of CUDA graphs, whose work is not seen
    backwards: int = 0  # calls of backward: more than one where gradients are accumulated
    updates: int = 0  # optimizer steps
    clips: bool = False  # gradients are scaled by their norm
    problem: str = ""  # why the step could not be watched

    @property
    def dtype(self) -> str:
        """The one that most of the FLOPs are done in; '' where there are none."""
        return max(self.flops, key=self.flops.__getitem__, default="")


class Ran(_Record, frozen=True, kw_only=True):
    """What really ran, as opposed to what was asked for."""

    device: str
    parameters: int = 0
    weights: str = ""  # dtype
    compute: str = ""  # dtype the matmuls were given
    fp32_matmul: str = ""  # 'ieee' or 'tf32', measured by multiplying numbers that TF32 cannot hold
    attention: str = ""  # the backend that SDPA chose
    optimizer: str = ""
    backend: str = ""  # of a collective: 'nccl' or 'gloo'
    kernels: str = ""  # of ours, where they did not run: 'triton: written out, no GPU'
    linear: str = ""  # of a user's own model: how many linear layers are in fp8, and which are not
    checkpointed: int = 0  # blocks of a user's own model that are computed again for the backward pass
    loss: float | None = None  # of the last step
    bad_loss: str = ""  # 'nan', 'inf' or '-inf', where it is no number that JSON can hold
    inductor_cache_hits: int = 0  # a warm compile cache makes compile time look short
    seen: Seen | None = None  # of a step whose work no formula says; None: not watched
    written: Recipe | None = None  # of a user's step: what its own code does, as far as that was seen


class PhaseTimes(_Record, frozen=True, kw_only=True):
    """Every sample of one phase, in the order taken; none is dropped."""

    phase: str
    wall_ns: tuple[int, ...]  # from a synchronised start to a synchronised end, on the host's clock
    launch_ns: tuple[int, ...] = ()  # until the host was free again; empty on the CPU
    gpu_ns: tuple[int, ...] = ()  # between CUDA events; empty on the CPU
    # True: all work was queued before it began, so gpu_ns holds no gap between launches
    gpu_held: tuple[bool, ...] = ()
    processes: tuple[int, ...] = ()  # how many of the samples each process took, in order; empty: one took all
    gpu_processes: tuple[int, ...] = ()  # of gpu_ns

    def by_process(self, clock: str) -> list[tuple[int, ...]]:
        """The samples of one clock, process by process; a file from outside may count wrongly, and is then taken as one."""
        samples: tuple[int, ...] = getattr(self, f"{clock}_ns")
        sizes = self.gpu_processes if clock == "gpu" else self.processes
        if sum(sizes) != len(samples) or min(sizes, default=0) < 1:
            return [samples]
        ends = list(itertools.accumulate(sizes))
        return [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class PhaseMemory(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """The allocator's figures for one phase: measured in a step of its own that is not timed, or predicted."""

    phase: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    reserved_bytes: int
    owners: dict[str, int] = {}  # at the phase's peak, where they are known


class Telemetry(_Record, frozen=True, kw_only=True):
    """NVML's readings during the measurement, one of each per tick."""

    at_ns: tuple[int, ...] = ()
    sm_mhz: tuple[int, ...] = ()
    memory_mhz: tuple[int, ...] = ()
    power_mw: tuple[int, ...] = ()
    temperature_c: tuple[int, ...] = ()
    utilisation: tuple[int, ...] = ()
    throttle: tuple[str, ...] = ()  # the reasons seen, other than idle; each once


LEARNT = 0.1  # of the first loss: below this the model has memorised the batch
LOSS, GRADIENT, UPDATE = "loss", "gradient", "update"  # what is compared: an update is what a step adds to the weights
OVERALL, TYPICAL, WEIGHT, SCALE, DECAY = "overall", "typical", "weight", "scale", "decay"  # by capture/differences.py


class Difference(_Record, frozen=True, kw_only=True):
    """How far one measure of one step is from the reference, and how far rounding alone takes it; both are shares."""

    kind: str  # LOSS, GRADIENT or UPDATE
    step: int  # from 1
    measure: str = OVERALL
    error: float
    rounding: float
    where: str = ""  # the weight, where it is one


class Agreement(_Record, frozen=True, kw_only=True):
    """A step's losses, gradients and updates compared with a reference's: the same step, the same weights and data."""

    losses: tuple[float, ...]  # of consecutive steps, from the first
    reference_losses: tuple[float, ...]
    differences: tuple[Difference, ...] = ()
    # Of runs of earlier versions, whose losses begin with the fourth step: the reference's, before it had learnt anything.
    first_loss: float | None = None
    gradient_error: float | None = None  # ‖g − r‖ / ‖r‖ over all weights, first step; None: there are no gradients
    worst_error: float = 0.0  # of one weight
    worst: str = ""  # its name
    n_weights: int = 0  # with gradients that were compared
    refused: tuple[str, ...] = ()  # of a reference: levers that were asked for and that the step cannot have
    draws: bool = False  # the reference's step draws random numbers
    same_draws: bool = True  # and this one the same: else it is judged by what other numbers do

    @property
    def loss_error(self) -> float | None:
        """The largest difference of a loss, as a share of the reference's; a NaN is the largest of all.

        A large model memorises one batch in a few steps. Its loss is then next to nothing, and so is its rounding: the
        share is of a tenth of the first loss at the least.
        """
        first = next(iter(self.reference_losses), 0.0) if self.first_loss is None else self.first_loss
        least = max(1e-12, LEARNT * abs(first))
        pairs = zip(self.losses, self.reference_losses, strict=False)
        errors = [abs(a - b) / max(abs(b), least) for a, b in pairs]
        return next((error for error in errors if error != error), max(errors, default=None))


class Loop(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """A training loop of the user's own, watched as it ran."""

    micro_steps: int = 1  # backward passes in a step: more than one where gradients are accumulated
    updates: int = 1  # optimizer steps in a step: more than one where there are several optimizers
    steps_before: int = 0  # that were not measured, with their warm-up
    waits_ns: dict[str, tuple[int, ...]] = {}  # the host's time in each measured step, by cause (capture/loop/waits.py)
    loader_workers: int | None = None  # of its DataLoader; None: it was not seen to have one
    apart_ns: dict[str, tuple[int, ...]] = {}  # between the measured steps and part of none, by cause: an evaluation, …
    rank: int = 0
    rank_walls_ns: dict[int, tuple[int, ...]] = {}  # the same steps by the other ranks
    exit_code: int | None = None  # of the script, where it ended by itself


class RankRow(_Record, frozen=True, kw_only=True, omit_defaults=True):
    """One of the ranks that share a step."""

    rank: int
    device: str = ""
    wall_ns: tuple[int, ...] = ()  # of the same steps as the first rank's
    memory: tuple[PhaseMemory, ...] = ()
    built_bytes: int = 0  # of the GPU's memory, before the first step
    peak_rss_bytes: int = 0
    trace_file: str = ""  # in the run's traces/ folder
    memory_file: str = ""  # in its memory/ folder


_Plan = TypeVar("_Plan")


class PointHead(_Record, Generic[_Plan], frozen=True, kw_only=True):
    """What a row of a run is about: enough to count the rows without decoding their samples."""

    schema: int = SCHEMA
    key: str
    trial: _Plan
    status: str


class Point(PointHead[Trial], frozen=True, kw_only=True):
    """One measured trial: a row of the run."""

    reason: str = ""  # why it is not ok, in one line
    hint: str = ""
    levers: tuple[str, ...] = ()  # that are to blame, where it is known
    phases: tuple[PhaseTimes, ...] = ()  # the first is the whole step
    warmup_ns: tuple[int, ...] = ()  # wall time of every warm-up step
    clock_ns: int = 0  # that a step which does nothing takes by the same clock, on the CPU; 0: not known
    warmup_rule: str = ""  # 'steady', 'forced', or 'budget': warm-up ended before it was steady
    setup_ns: int = 0  # building the model; with a CUDA graph, its warm-up and capture too
    captured_first_ns: int = 0  # a graph's first warm-up step beyond a later one: compilation, if asked for
    # Why sampling ended: 'precise', 'samples', 'budget', 'interrupted', 'timeout'; of a comparison: 'decided', 'processes'
    # (as many as were asked for), 'budget'.
    stopped: str = ""
    memory: tuple[PhaseMemory, ...] = ()
    peak_rss_bytes: int = 0
    ran: Ran | None = None
    telemetry: Telemetry | None = None
    environment: Environment | None = None
    busy_cores: float = 0.0  # in use by other processes, as it began or while it was timed; 0: none that matter
    trace_file: str = ""  # in the run's traces/ folder
    traced_step_ns: int = 0  # per step under the profiler: against the step's wall time, the profiler's overhead
    memory_file: str = ""  # a snapshot in the run's memory/ folder
    paired_with: str = ""  # key of the point it was compared with: process i of one ran beside process i of the other
    together: bool = True  # those two ran at the same time, sample by sample; else one after the other
    loop: Loop | None = None  # of a step of a watched loop
    ranks: tuple[RankRow, ...] = ()  # where several share the step; all else is the first's
    started_at: str = ""  # ISO 8601, UTC
    elapsed_s: float = 0.0

    def times(self, phase: str = STEP) -> PhaseTimes | None:
        """The samples of one phase, if it was measured."""
        return next((p for p in self.phases if p.phase == phase), None)


class RunHeader(_Record, frozen=True, kw_only=True):
    """What a run set out to do; written once, before the first row."""

    schema: int = SCHEMA
    id: str
    kind: str  # the verb: bench, sweep, …
    name: str = ""
    created_at: str
    created_ns: int
    command: str = ""
    trials: tuple[Trial, ...] = ()  # the plan, in order: a table follows it, whatever the order of the rows
