"""A trace by Nsight Systems: the step again, in a process that nsys runs; its report exported to SQLite. No torch here."""

import gzip
import os
import secrets
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from flopwise.capture.nsys_program import can_discard_environment
from flopwise.capture.pipes import GARBLED, GARBLED_HINT, EventReader, GarbledError
from flopwise.errors import one_line
from flopwise.keeper import end_kept, start_kept
from flopwise.records.events import Done, Event, NsysJob, Started, TraceRequest, TraceWritten
from flopwise.records.run import CRASH, ERROR, INTERRUPTED, OK, TIMEOUT
from flopwise.spec.workload import Trial

SUFFIX = ".nsys.sqlite"
GZIP_FROM_BYTES = 4 << 20  # a smaller file is not worth the time to unpack it
_POLL_S = 0.05
_REPORT, _EXPORT, _EVENTS, _JOB = "report.nsys-rep", "export.sqlite", "events.jsonl", "job.json"
_LOG_HINT = "see what nsys printed in the run's logs/ folder"


class _Failed(Exception):
    """The capture is over: `done` says how."""

    def __init__(self, done: Done) -> None:
        self.done = done


def trace_with_nsys(
    program: str, trial: Trial, request: TraceRequest, log: Path, timeout_s: float
) -> tuple[TraceWritten | None, Done]:
    """Trace the trial's step and store the export at `request.path`, with `.gz` appended if it is large.

    A failure is a Done with a status and a reason, and leaves neither a file nor a process behind.
    """
    target = Path(request.path)
    deadline = time.monotonic() + timeout_s
    try:
        with _scratch(target) as folder:
            key = secrets.token_hex(16)
            job = NsysJob(trial=trial, trace=request, events=str(folder / _EVENTS), key=key, timeout_s=timeout_s)
            (folder / _JOB).write_bytes(msgspec.json.encode(job))
            step_ns = _capture(program, folder, key, log, deadline)
            _export(program, folder, log, deadline)
            forget_environment(folder / _EXPORT)
            return TraceWritten(path=str(_stored(folder / _EXPORT, target)), step_ns=step_ns), Done(status=OK)
    except _Failed as failure:
        return None, failure.done
    except KeyboardInterrupt:
        return None, Done(status=INTERRUPTED, reason="while nsys traced the step", stopped="interrupted")
    except sqlite3.Error as error:
        return None, Done(status=ERROR, reason=f"the export of nsys cannot be read: {error}", hint=_LOG_HINT)
    except OSError as error:
        reason = f"cannot write the trace to {target.parent}: {error.strerror or error}"
        return None, Done(status=ERROR, reason=reason, hint="is the disk full?")


def profile_command(program: str, report: Path, job: Path, discard_environment: bool) -> list[str]:
    """`nsys profile` around the step: CUDA and NVTX inside the range that the step opens, nothing of the CPU's.

    >>> profile_command("nsys", Path("/runs/50%/report"), Path("job.json"), discard_environment=False)[-5]
    '--output=/runs/50%%/report'
    """
    # --capture-range-end=stop: by default the process would end with the range, before it has reported its result.
    # --wait=primary: not for the compiler's processes, which outlive the step.
    ends = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--wait=primary"]
    private = ["--discard-environment=true"] if discard_environment else []
    output = f"--output={str(report).replace('%', '%%')}"  # %h, %p and %q{NAME} are placeholders
    traced = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"]
    target = [sys.executable, "-m", "flopwise.capture.nsys_target", str(job)]
    return [program, "profile", *traced, *ends, *private, "--force-overwrite=true", output, *target]


def export_command(program: str) -> list[str]:
    """`nsys export` of the report to SQLite, in the folder that holds both.

    >>> " ".join(export_command("nsys"))
    'nsys export --type=sqlite --force-overwrite=true --output=export.sqlite report.nsys-rep'
    """
    return [program, "export", "--type=sqlite", "--force-overwrite=true", f"--output={_EXPORT}", _REPORT]


def _capture(program: str, folder: Path, key: str, log: Path, deadline: float) -> int:
    """Run the step under nsys, which writes a report into the folder; nanoseconds per traced step."""
    report = folder / _REPORT
    command = profile_command(program, report.with_suffix(""), folder / _JOB, can_discard_environment(program))
    code = _run(command, log, deadline)
    events = _events(folder / _EVENTS, key)
    done = next((event for event in events if isinstance(event, Done)), None)
    if done is not None and done.status != OK:
        raise _Failed(done)
    if not any(isinstance(event, Started) for event in events):
        raise _Failed(_fault(f"nsys did not run the step (exit code {code})", log))
    traced = next((event for event in events if isinstance(event, TraceWritten)), None)
    if traced is None:
        raise _Failed(_fault(f"the process under nsys ended without a result (exit code {code})", log, CRASH))
    if not report.exists():
        raise _Failed(_fault(f"nsys wrote no report (exit code {code})", log))
    return traced.step_ns


def _export(program: str, folder: Path, log: Path, deadline: float) -> None:
    code = _run(export_command(program), log, deadline, cwd=folder)
    if code or not (folder / _EXPORT).exists():
        raise _Failed(_fault(f"nsys could not export its report (exit code {code})", log))


def _run(command: Sequence[str], log: Path, deadline: float, cwd: Path | None = None) -> int:
    """Run nsys to its end, under a keeper so that all of it can be ended; the exit code."""
    if shutil.which(command[0]) is None:
        reason = f"{command[0]} cannot be started: No such file or directory"
        raise _Failed(Done(status=ERROR, reason=reason, hint="see `flopwise doctor`"))
    process = start_kept(command, log.resolve(), cwd)
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                reason, hint = f"nsys {command[1]} took longer than --timeout", "raise it, or make the workload smaller"
                raise _Failed(Done(status=TIMEOUT, reason=reason, hint=hint, stopped="timeout"))
            time.sleep(_POLL_S)
        return process.returncode
    finally:
        end_kept(process)


def _events(path: Path, key: str) -> list[Event]:
    """The step's events, without a last line that was cut off."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    reader = EventReader(key)
    try:
        return [reader.event(line[:-1]) for line in lines if line.endswith(b"\n")]
    except GarbledError:
        raise _Failed(Done(status=CRASH, reason=GARBLED, hint=GARBLED_HINT)) from None


def _fault(what: str, log: Path, status: str = ERROR) -> Done:
    line = _error_line(log)
    return Done(status=status, reason=f"{what}: {line}" if line else what, hint=_LOG_HINT)


def _error_line(log: Path) -> str:
    """The last line of the log that names an error, else its last line."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        lines = [one_line(line, 200) for line in file.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if any(word in line.lower() for word in ("error", "fatal", "failed", "unable"))]
    return (errors or lines or [""])[-1]


def forget_environment(sqlite: Path) -> None:
    """Take the process's environment out of an export: older nsys cannot omit it, and it must not be stored in a run.

    It is in a table of its own (TARGET_INFO_SYSTEM_ENV, `DeviceEnvironment`), and its lines may be among the strings.
    """
    db = sqlite3.connect(sqlite, isolation_level=None)
    try:
        known = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in known & {"TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE"}:
            db.execute(f"DELETE FROM {table}")
        if "StringIds" in known:
            lines = ((os.fsencode(f"{name}={value}"),) for name, value in os.environ.items() if value)
            db.execute("CREATE TEMP TABLE lines (line TEXT)")
            db.executemany("INSERT INTO lines VALUES (CAST(? AS TEXT))", lines)
            db.execute("DELETE FROM StringIds WHERE value IN (SELECT line FROM lines)")
        db.execute("VACUUM")  # what was deleted would still be in the file's free pages
    finally:
        db.close()


def _stored(sqlite: Path, target: Path) -> Path:
    """The export under its final name, whole or not at all."""
    if sqlite.stat().st_size < GZIP_FROM_BYTES:
        sqlite.replace(target)
        return target
    packed, target = sqlite.with_name(f"{_EXPORT}.gz"), target.with_name(target.name + ".gz")
    with sqlite.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as out:
        shutil.copyfileobj(source, out, 1 << 20)
    packed.replace(target)
    return target


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder next to the target, on the same disk; removed afterwards, whatever happens."""
    folder = target.with_name(f"partial-{target.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
