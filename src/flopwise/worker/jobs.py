"""The worker's jobs: measure a trial, record its memory, check its losses, dry-run it, probe the device, run an experiment."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import torch

from flopwise.capture.agreement import check_agreement
from flopwise.capture.build import resolve_device
from flopwise.capture.calibrate import probe_count, probes
from flopwise.capture.environment import device_info
from flopwise.capture.memory_limit import free_bytes, limit_memory
from flopwise.capture.memory_trial import record_trial
from flopwise.capture.pipes import Emit, read_line
from flopwise.capture.trials import failure, run_trial
from flopwise.errors import FlopwiseError
from flopwise.experiments.child import run_experiment
from flopwise.lm.ranks import ALONE, Ranks
from flopwise.predict.dry.run import dry_run
from flopwise.predict.prediction import predict
from flopwise.predict.step_time import counts_by_phase
from flopwise.records.events import AgreementResult, Done, DryRunResult, ProbeMeasured, Request
from flopwise.records.run import OK
from flopwise.spec.workload import Trial, Workload
from flopwise.worker.torchrun import run_ranks


def serve(request: Request, emit: Emit, commands: int) -> None:
    """Do what is asked, and emit the results; what a trial in turns is told comes from `commands`."""
    if request.dry:
        with _failure_reported(emit):
            _dry_runs([msgspec.json.decode(one, type=Workload) for one in request.dry], request.architecture, emit)
    elif request.experiment is not None:
        with _failure_reported(emit):
            run_experiment(request.experiment, emit)
            emit(Done(status=OK))
    elif request.trial:
        trial = msgspec.json.decode(request.trial, type=Trial)
        if trial.workload.many:
            with _failure_reported(emit):
                run_ranks(request, trial, emit, commands)
            return
        if trial.device == "cpu" or not torch.cuda.is_available():
            limit_memory()
        run_trial_as_asked(request, trial, emit, commands)
    else:
        _report_device(request, emit)


def _dry_runs(workloads: list[Workload], architecture: str, emit: Emit) -> None:
    """The first has to succeed; of the others, what cannot be dry-run is told by None."""
    emit(DryRunResult(run=dry_run(workloads[0], architecture)))
    for other in workloads[1:]:
        try:
            emit(DryRunResult(run=dry_run(other, architecture)))
        except FlopwiseError:
            emit(DryRunResult(run=None))


def _report_device(request: Request, emit: Emit) -> None:
    with _failure_reported(emit):
        device = resolve_device(request.device)
        emit(device_info(device, free_bytes(device)))
        if request.calibrate:
            of = probe_count(device)
            for n, probe in enumerate(probes(device, lambda workload: counts_by_phase(predict(workload).ops)), 1):
                emit(ProbeMeasured(probe=probe, n=n, of=of))


def run_trial_as_asked(request: Request, trial: Trial, emit: Emit, commands: int, ranks: Ranks = ALONE) -> None:
    """Time it, record its memory or check its losses; of several ranks, all do it at the same time."""
    own = _until_interrupted(commands if request.turns and ranks.first else None)
    may_go_on = lambda: ranks.told(own())  # noqa: E731
    if request.agree is not None:
        with _failure_reported(emit):
            emit(AgreementResult(agreement=check_agreement(trial, request.agree)))
    elif request.memory is not None:
        record_trial(trial, emit, may_go_on, request.memory)
    else:
        run_trial(trial, emit, may_go_on, request, ranks)


def _until_interrupted(turns: int | None) -> Callable[[], bool]:
    """Whether the next round may begin: not after an interruption, and in turns only when asked to, by this descriptor."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGTERM, interrupt)
    return lambda: not interrupted and (turns is None or read_line(turns) == b"go\n")


@contextmanager
def _failure_reported(emit: Emit) -> Iterator[None]:
    """A failure becomes an event; the log keeps the traceback, unless the error explains itself."""
    try:
        yield
    except Exception as error:
        emit(failure(error))
        if not isinstance(error, FlopwiseError):
            raise
