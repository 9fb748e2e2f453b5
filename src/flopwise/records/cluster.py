"""What travels between the process that drives a sweep and a cluster's node: a request one way, what it left the other."""

import msgspec

from flopwise.records.run import Point
from flopwise.spec.workload import Trial, Workload


class TrialRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Measure one trial."""

    trial: Trial
    folder: str  # the driver's working directory: a step of the user's own may be named relative to it


class TuneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tune one workload, whole: its comparisons need one and the same GPU."""

    workload: Workload
    folder: str
    device: str = "auto"
    budget: float
    memory_limit: int | None = None
    keep_exact: bool = False
    allow: tuple[str, ...] = ()
    seconds: float
    timeout: float
    command: str = ""


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sends back: a row, and the files that belong into the run's directory."""

    point: Point | None = None  # of a trial
    files: dict[str, bytes] = {}  # by their path in the run's directory
    interrupted: bool = False
    problem: str = ""  # why flopwise cannot work on that node
    hint: str = ""
