"""What runs on a cluster's node: one trial as on any machine, in a folder of its own whose files are sent back."""

import os
import socket
from pathlib import Path

import msgspec

from flopwise.capture.functions import NODE
from flopwise.capture.isolate import Worker
from flopwise.capture.point_builder import PointBuilder
from flopwise.capture.progress import Progress
from flopwise.capture.runners.measured import measured
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.records.cluster import Returned, TrialRequest
from flopwise.records.events import Done
from flopwise.records.run import ERROR, INTERRUPTED, UNSUPPORTED
from flopwise.scratch import scratch_folder
from flopwise.version import __version__

MOST_FILE_BYTES = 512 * 2**20


def prepare(version: str, folder: str) -> str:
    """Make this process stand where the driver stands; why it cannot work here, or ''."""
    os.environ[NODE] = socket.gethostname()
    if os.path.isdir(folder):
        os.chdir(folder)
    if version != __version__:
        return f"{os.environ[NODE]} has flopwise {__version__}, and the driver {version}"
    return ""


def measure_here(version: str, asked: bytes) -> bytes:
    """A `TrialRequest` carried out on this node: a `Returned`, both as MessagePack."""
    request = msgspec.msgpack.decode(asked, type=TrialRequest)
    if problem := prepare(version, request.folder):
        return msgspec.msgpack.encode(Returned(problem=problem, hint="install the same version on every node"))
    trial = request.trial
    with scratch_folder() as name:
        folder = Folder(name)
        try:
            worker = Worker(trial.workload.recipe.compile != "off")
        except FlopwiseError as error:
            problem = f"{socket.gethostname()}: {error.message}"
            return msgspec.msgpack.encode(Returned(problem=problem, hint=error.hint))
        with worker:
            try:
                point = measured(worker, trial, folder, Progress())
            except FlopwiseError as error:  # nsys is not there
                status = UNSUPPORTED if isinstance(error, Unsupported) else ERROR
                point = PointBuilder(trial).point(Done(status=status, reason=error.message, hint=error.hint))
        returned = Returned(point=point, files=folder.files(), interrupted=point.status == INTERRUPTED)
    return msgspec.msgpack.encode(returned)


class Folder:
    """A run's folders on a node: what is written there is sent to the run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_path(self, key: str) -> Path:
        return self._in("logs", f"{key}.log")

    def trace_path(self, name: str) -> Path:
        return self._in("traces", name)

    def _in(self, folder: str, name: str) -> Path:
        (self.path / folder).mkdir(exist_ok=True)
        return self.path / folder / name

    def files(self) -> dict[str, bytes]:
        """Every file by its path; one that is too large stays behind."""
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file())
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in found
            if path.stat().st_size <= MOST_FILE_BYTES
        }
