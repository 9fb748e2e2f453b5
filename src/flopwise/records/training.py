"""What a run of `train` keeps: what was asked for, then a row for every few steps."""

import math
from pathlib import Path

import msgspec

from flopwise.records.printed import Printed
from flopwise.records.run import Environment, RunHeader

SCHEMA = 1
FINISHED, STOPPED, FAILED, UNFINISHED = "finished", "stopped", "failed", "not finished"
LOADER, LAUNCHING, GPU = "the loader", "launching", "the GPU"
STALLED = 0.05  # of a step's time spent waiting for data: more is a finding
BEHIND = 0.1  # of a step: a GPU that still has so much to do when the host has launched all is the limit


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is trained. Every field is stored, so that a run can go on."""

    steps: int
    data: str  # the folder of the corpus, from the home folder on; '': in the run
    rate: float  # the learning rate at its peak
    floor: float = 0.1  # of the peak, at the end
    warmup_steps: int = 100
    clip: float = 1.0  # the gradients' norm is cut to it; 0: it is not
    accumulate: int = 1  # batches before an update
    evaluate_every: int = 0  # 0: at the end alone
    evaluation_batches: int = 20
    checkpoint_every: int = 0  # 0: at the end alone
    log_every: int = 10
    seed: int = 0
    world: int = 1  # processes, each with its own batches
    tensorboard: bool = False


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun", tag_field="row"):
    """The first row, and one more whenever the run is resumed."""

    schema: int = SCHEMA
    settings: Settings
    parameters: int
    vocabulary: int  # of the tokenizer; the model's may be larger
    tokens: int  # in the corpus, for training
    flops_per_step: float  # useful ones, of all processes
    peak_flops_s: float | None = None  # of all GPUs, in the precision that is computed in
    device: str
    environment: Environment | None = None
    step: int = 0  # that it goes on from


class Steps(msgspec.Struct, frozen=True, kw_only=True, tag="steps", tag_field="row"):
    """A few steps. Times are of all of them together; `wall_ns` is without evaluation and checkpoints."""

    step: int  # the last of them
    losses: tuple[float | None, ...]  # one a step; None: not a number
    norms: tuple[float | None, ...] = ()  # of the gradients before they are cut; empty where they are not
    rate: float
    wall_ns: int
    waited_ns: int  # for the loader
    launched_ns: int  # by the host, inside the step; launches that wait for a full queue included
    behind_ns: int | None = None  # after the last launch, until the GPU had done it; None on a CPU
    gpu_ns: int | None = None  # from each step's first kernel to its last, waiting between them included
    memory_bytes: int | None = None  # peak so far
    evaluation: float | None = None  # loss on text that is held out

    @property
    def loss(self) -> float:
        """The mean of those that are numbers."""
        known = [loss for loss in self.losses if loss is not None]
        return sum(known) / len(known) if known else math.nan

    @property
    def limited_by(self) -> str:
        """What these steps waited for: the loader, launching, or the GPU (on a CPU: '')."""
        if self.waited_ns > STALLED * self.wall_ns:
            return LOADER
        if self.behind_ns is None or not self.losses:
            return ""
        return GPU if self.behind_ns > BEHIND * self.wall_ns / len(self.losses) else LAUNCHING


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="row"):
    """The last row: how it ended, and after which step."""

    status: str
    step: int
    reason: str = ""


Row = Begun | Steps | Stopped


class Training(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A run of `train`, read back. Of a step that was run again after a resume, the later one counts."""

    path: Path
    header: RunHeader
    begun: Begun
    steps: tuple[Steps, ...]
    status: str
    reason: str = ""
    warnings: tuple[str, ...] = ()  # what was left out, as the run is damaged
    before: tuple[Begun, ...] = ()  # how it began, and was resumed, before `begun`

    def begun_at(self, step: int) -> Begun:
        """How the part that took a step was begun."""
        return next((one for one in (self.begun, *reversed(self.before)) if one.step < step), self.begun)

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else self.begun.step

    @property
    def tokens_per_step(self) -> int:
        work, settings = self.header.trials[0].workload, self.begun.settings
        return work.batch * work.context * settings.accumulate * settings.world

    def headline(self) -> str:
        loss = f", loss {self.steps[-1].loss:.3f}" if self.steps else ""
        return f"{self.header.name}: {self.last_step} of {self.begun.settings.steps} steps{loss} ({self.status})"
