"""A Ray cluster: one task for every trial, with the GPUs and CPUs that it needs."""

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast
from urllib.parse import urlsplit

import msgspec

from flopwise.capture.runners.cluster import Cluster, Ended, Job, call_there
from flopwise.capture.runners.nodes import Node, Share
from flopwise.errors import FlopwiseError, one_line
from flopwise.records.cluster import Returned
from flopwise.records.run import INTERRUPTED, LOST, OOM

CONNECT_S = 5.0


class RayCluster(Cluster):
    """`address`: that of a cluster (`ray://host:10001`, `host:6379`); '': the one that runs here, or a new one here alone."""

    name = "ray"
    at_once = 1_000

    def __init__(self, address: str = "") -> None:
        self.ray = ray = _import_ray()
        self.ours = not ray.is_initialized()
        self.quiet = _WithoutRay(sys.stdout)
        if not self.ours:
            return
        found = address or _running_here()
        if address:
            _check_reachable(address)
        try:
            _join(ray, found)
        except _NOT_STARTED:  # on a busy machine Ray's own limits of time are short: once more
            try:
                _join(ray, found)
            except _NOT_STARTED as error:
                raise FlopwiseError(f"no Ray cluster answers at {found or 'this machine'}: {error}", _START) from None
        sys.stdout = cast(TextIO, self.quiet)

    def nodes(self) -> list[Node]:
        up = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return [Node(int(has.get("CPU", 0)), int(has.get("GPU", 0))) for has in up]

    def submit(self, job: Job, given: Share) -> Hashable:
        function, *arguments = call_there(job)
        # Ray itself would send a task that needs too much memory again for ever: what is lost is sent again by us.
        options = {"num_cpus": given.cpus, "num_gpus": given.gpus, "max_retries": 0, "name": f"flopwise {job.name}"}
        handle: Hashable = self.ray.remote(function).options(**options).remote(*arguments)
        return handle

    def wait(self, handles: Sequence[Hashable], seconds: float) -> list[Hashable]:
        if not handles:
            time.sleep(seconds)
            return []
        first: list[Hashable] = self.ray.wait(handles, num_returns=1, timeout=seconds)[0]
        if not first:
            return []
        ended: list[Hashable] = self.ray.wait(handles, num_returns=len(handles), timeout=0)[0]
        return ended

    def ended(self, handle: Hashable) -> Ended:
        errors = self.ray.exceptions
        try:
            return Ended(msgspec.msgpack.decode(self.ray.get(handle), type=Returned))
        except errors.TaskCancelledError:
            return Ended(status=INTERRUPTED, reason="taken back")
        except errors.OutOfMemoryError:
            return Ended(status=OOM, reason="Ray ended it: its node was short of memory")
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.LocalRayletDiedError):
            return Ended(status=LOST, reason="its worker or its node was lost")
        except errors.RayError as error:
            return Ended(Returned(problem=f"Ray: {_cause(error)}", hint=_INSTALL))

    def cancel(self, handles: Sequence[Hashable], force: bool) -> None:
        for handle in handles:
            with suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.cancel(handle, force=force)

    def close(self) -> None:
        if self.ours:
            self.ray.shutdown()
        if cast(object, sys.stdout) is self.quiet:
            sys.stdout = self.quiet.stream


class _WithoutRay:
    """Standard output without what Ray's own threads say of lost nodes: data goes there, and a lost node is a note."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread().name.startswith("ray_") else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_NOT_STARTED = (ConnectionError, RuntimeError, ValueError, AssertionError)
_START = "ray start --head starts one; ray stop forgets one that has died"
_INSTALL = "is flopwise[torch] installed on every node, in the same version?"


def _import_ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise FlopwiseError("--on ray needs Ray, which is not installed", "pip install 'flopwise[ray]'") from None
    found: ModuleType = ray
    return found


def _join(ray: ModuleType, address: str) -> None:
    """Join the cluster at `address`, or start one here; a failure leaves nothing half done, which Ray itself would."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        ray.init(address=address or "local", **quiet, **({} if address else {"include_dashboard": False}))
    except BaseException:
        ray.shutdown()
        raise


def _running_here() -> str:
    """The address of the cluster that this machine belongs to; '': there is none.

    Ray keeps the address of a cluster that has died, and tries it for minutes.
    """
    if address := os.environ.get("RAY_ADDRESS", ""):
        _check_reachable(address)
        return address
    noted = Path(os.environ.get("RAY_TMPDIR", "") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    with suppress(OSError, FlopwiseError):
        address = noted.read_text().strip()
        _check_reachable(address)
        return address
    return ""


def _check_reachable(address: str) -> None:
    """Refuse at once an address where nothing listens."""
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = place.port
    except ValueError:
        port = None
    if not place.hostname or port is None:
        raise FlopwiseError(f"'{address}' is no address of a Ray cluster", "like ray://host:10001")
    try:
        socket.create_connection((place.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FlopwiseError(f"no Ray cluster answers at {address}: {reason}", _START) from None


def _cause(error: BaseException) -> str:
    """The last line of Ray's text, which names the exception on the node."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return one_line(lines[-1] if lines else type(error).__name__)
