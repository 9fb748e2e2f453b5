"""Workers by fork: torch is imported once per test process, not once per `Worker`.

A worker (`python -m flopwise.worker`) spends seconds on importing torch. Here a server imports what a worker imports, and
forks for every worker that a test starts: each still is a process of its own, in a session of its own, with the environment
and the folder that it was started with, and may crash, hang or be killed. `workers_are_forked` puts this in place of
`subprocess.Popen` for that one command; any other command, and a worker whose environment must be known before torch is
imported, is started as always.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

WORKER = (sys.executable, "-m", "flopwise.worker")
# Read when torch, Triton or Python itself is loaded: a worker that has another value is started as always.
_READ_AT_IMPORT = ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "TORCH_LOGS", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
_LOADED = {"torch", "triton", "numpy", "transformers", "msgspec", "flopwise"}
_MESSAGE_BYTES = 1 << 20
_ON_GPU = Path("/dev/nvidiactl").exists()  # CUDA cannot be used in a fork of a process that has asked for it


class ForkedWorker:
    """The part of `subprocess.Popen` that a worker's owner uses."""

    def __init__(self, server: socket.socket, words: Sequence[str], options: dict[str, Any]) -> None:
        self.args, self.returncode = words, None
        ours: dict[str, int] = {}
        theirs = [self._end(name, options.get(name), ours) for name in ("stdin", "stdout", "stderr")]
        self._status, status = os.pipe()
        start = {
            "words": list(words[len(WORKER) :]),
            "cwd": str(options.get("cwd") or Path.cwd()),
            "env": dict(options.get("env") or os.environ),
            "session": options.get("start_new_session", False),
        }
        socket.send_fds(server, [json.dumps(start).encode()], [*theirs, status])
        for fd in (*theirs, status):
            os.close(fd)
        self.stdin: IO[bytes] | None = open(ours["stdin"], "wb", 0) if "stdin" in ours else None  # noqa: SIM115
        self.stdout: IO[bytes] | None = open(ours["stdout"], "rb", 0) if "stdout" in ours else None  # noqa: SIM115
        self.stderr: IO[bytes] | None = open(ours["stderr"], "rb", 0) if "stderr" in ours else None  # noqa: SIM115
        self.pid = int(self._line())

    @staticmethod
    def _end(name: str, given: Any, ours: dict[str, int]) -> int:
        """The worker's end of a standard stream; ours is put into `ours`."""
        if given == subprocess.PIPE:
            read, write = os.pipe()
            ours[name], end = (write, read) if name == "stdin" else (read, write)
            return end
        if given == subprocess.DEVNULL:
            return os.open(os.devnull, os.O_RDWR)
        inherited = ("stdin", "stdout", "stderr").index(name)
        return os.dup(inherited if given is None else given if isinstance(given, int) else given.fileno())

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := os.read(self._status, 1)):
                return b"-9\n"  # the server is gone, and the worker with it
            line += byte
        return line

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._line())
            os.close(self._status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.poll()  # type: ignore[return-value]

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sign)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Server:
    """The process that has torch loaded, and forks; started when it is first needed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.line: socket.socket | None = None

    def start(self, words: Sequence[str], options: dict[str, Any]) -> ForkedWorker | None:
        """A worker; None if it has to be started as always."""
        if self._differs(dict(options.get("env") or os.environ)):
            return None
        self.line = self.line or self._open()
        try:
            return ForkedWorker(self.line, words, options)
        except (BrokenPipeError, ConnectionResetError):  # someone ended the server
            self.close()
            return None

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        source = os.pathsep.join(filter(None, (str(_source()), self.environment.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=self.environment | {"PYTHONPATH": source},
        )
        theirs.close()
        return ours

    def _differs(self, wanted: dict[str, str]) -> bool:
        if any(wanted.get(name) != self.environment.get(name) for name in _READ_AT_IMPORT):
            return True
        known = {str(_source()), *self.environment.get("PYTHONPATH", "").split(os.pathsep)}
        places = [Path(place) for place in wanted.get("PYTHONPATH", "").split(os.pathsep) if place not in known]
        return any((place / name).exists() or (place / f"{name}.py").exists() for place in places for name in _LOADED)

    def close(self) -> None:
        if self.line is not None:
            self.line.close()  # the server ends, and what it forked with it
            self.process.wait()
            self.line = None


@contextmanager
def workers_are_forked() -> Iterator[None]:
    """`subprocess.Popen` of a worker is a fork of one that has torch loaded."""
    real, server = subprocess.Popen, Server(dict(os.environ))

    class Popen(real):  # type: ignore[type-arg, valid-type, misc]
        def __new__(cls, args: Any, *positional: Any, **options: Any) -> Any:
            words = tuple(args) if isinstance(args, list | tuple) else ()
            ours = words[: len(WORKER)] == WORKER and not positional and not _ON_GPU
            if ours and (forked := server.start(words, options)):
                return forked
            return super().__new__(cls)

    try:
        with mock.patch.object(subprocess, "Popen", Popen):
            yield
    finally:
        server.close()


def _source() -> Path:
    import flopwise

    return Path(flopwise.__file__).parents[1]


def _serve(line: socket.socket) -> None:
    """Import what a worker imports, then fork for every message; the compiler when it is first asked for."""
    import torch._dynamo

    from flopwise.keeper import die_with_parent

    die_with_parent()
    os.environ["TORCH_WARM_POOL"] = "0"
    from flopwise.worker import jobs  # noqa: F401

    while True:
        message, fds, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 4)
        _reap()
        if not message:
            time.sleep(0.1)
            return _reap()
        start = json.loads(message)
        if "--compiler" in start["words"]:
            import torch._inductor.compile_fx  # noqa: F401
        if os.fork() == 0:
            line.close()
            _wait_for_worker(start, *fds)
        for fd in fds:
            os.close(fd)


def _reap() -> None:
    """Take leave of the processes that have ended, so that their time counts."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _wait_for_worker(start: dict[str, Any], stdin: int, stdout: int, stderr: int, status: int) -> NoReturn:
    """Between the server and a worker: says the worker's process id, then how it ended."""
    from flopwise.keeper import die_with_parent

    die_with_parent()
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _become_worker(start, stdin, stdout, stderr)
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _become_worker(start: dict[str, Any], *streams: int) -> NoReturn:
    if start["session"]:
        os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(start["cwd"])
    before = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    os.environ.clear()
    os.environ.update(start["env"])
    asked = [place for place in start["env"].get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [start["cwd"], *asked, *(place for place in sys.path[1:] if place not in before), str(_source())]
    sys.argv = [str(Path(__file__)), *start["words"]]
    code = 1
    try:
        for place in asked:
            if (own := Path(place) / "sitecustomize.py").is_file():  # as Python does when it starts
                exec(compile(own.read_text(), own, "exec"), {"__name__": "sitecustomize"})
        from flopwise.worker.__main__ import main

        main()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # without taking torch down piece by piece
