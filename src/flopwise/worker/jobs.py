"""What a worker can be asked to do: measure a trial, record its memory, compare its losses, run it dry, probe, experiment."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import torch

from flopwise.capture.agreement import agree
from flopwise.capture.build import resolve_device
from flopwise.capture.calibrate import how_many, probes
from flopwise.capture.environment import environment
from flopwise.capture.memory_limit import free_bytes, limit_memory
from flopwise.capture.memory_trial import record_trial
from flopwise.capture.pipes import Emit, read_line
from flopwise.capture.trials import run_trial, why
from flopwise.errors import FlopwiseError
from flopwise.experiments.child import run_experiment
from flopwise.predict.dry.run import dry_run
from flopwise.predict.prediction import predict
from flopwise.predict.step_time import counts_by_phase
from flopwise.records.events import Agreed, Done, Dried, Probed, Request, Surroundings
from flopwise.records.run import OK
from flopwise.spec.workload import Trial, Workload


def serve(request: Request, emit: Emit) -> None:
    """Do what is asked, and say what was found."""
    if request.dry:
        with _failure_told(emit):
            emit(Dried(run=dry_run(msgspec.json.decode(request.dry, type=Workload), request.architecture)))
    elif request.experiment is not None:
        with _failure_told(emit):
            run_experiment(request.experiment, emit)
            emit(Done(status=OK))
    elif request.trial:
        _trial(request, emit)
    else:
        _look(request, emit)


def _look(request: Request, emit: Emit) -> None:
    with _failure_told(emit):
        device = resolve_device(request.device)
        emit(Surroundings(environment=environment(device), device=str(device), free_bytes=free_bytes(device)))
        if request.calibrate:
            of = how_many(device)
            for n, probe in enumerate(probes(device, lambda workload: counts_by_phase(predict(workload).ops)), 1):
                emit(Probed(probe=probe, n=n, of=of))


def _trial(request: Request, emit: Emit) -> None:
    may_go_on = _until_interrupted(request.turns)
    trial = msgspec.json.decode(request.trial, type=Trial)
    if trial.device == "cpu" or not torch.cuda.is_available():
        limit_memory()
    if request.agree is not None:
        with _failure_told(emit):
            emit(Agreed(agreement=agree(trial, request.agree)))
    elif request.memory is not None:
        record_trial(trial, emit, may_go_on, request.memory)
    else:
        run_trial(
            trial, emit, may_go_on, request.turns, request.trace, request.compare, request.fewest, request.details
        )


def _until_interrupted(turns: bool) -> Callable[[], bool]:
    """Whether the next round may begin: not after an interruption, and in turns only when asked to."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGTERM, interrupt)
    return lambda: not interrupted and (not turns or read_line() == b"go\n")


@contextmanager
def _failure_told(emit: Emit) -> Iterator[None]:
    """What fails is an event; the log keeps the traceback, unless it was refused in words."""
    try:
        yield
    except Exception as error:
        emit(why(error))
        if not isinstance(error, FlopwiseError):
            raise
