"""Who holds every byte of memory: of a workload's own steps, of a stored run, of anyone's snapshot; or predicted."""

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from flopwise.atomic import write_atomically
from flopwise.capture.functions import ALLOWED, Target, as_workload
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.errors import Failed, FlopwiseError, Interrupted
from flopwise.predict.dry.architecture import architecture_of
from flopwise.predict.fit import memory_levers, too_large
from flopwise.predict.machine import gpu_of
from flopwise.predict.prediction import check_dry_run, check_fp8, memory_from_shapes, predict_memory
from flopwise.predict.shapes.network import weight_shapes
from flopwise.records.events import MemoryRequest
from flopwise.records.memory import STACKS, StoredPredictions, predictions_path
from flopwise.records.run import INTERRUPTED, OK
from flopwise.snapshot.answers import MemoryReport
from flopwise.snapshot.before import Sizes, element_counts
from flopwise.snapshot.predicted import predicted_report
from flopwise.snapshot.read import read_snapshot
from flopwise.snapshot.report import report
from flopwise.snapshot.stored import stored_report
from flopwise.spec import fields
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import ModelSpec, preset_names
from flopwise.spec.user_step import is_user_step
from flopwise.spec.workload import Sampling, Trial, Workload, workload
from flopwise.store import Run, StoredRun, check_tag, find, runs_root
from flopwise.store import tag as tag_run

SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
MOST_STEPS = 1000
_KINDS = ("op:", "hf:")


def memory(
    target: Target | Path | StoredRun,
    *,
    device: str = "auto",
    steps: int = 3,
    record: str = "python",
    stacks: bool = False,
    predict: bool = False,
    gpu: str = "",
    model: str = "",
    timeout: float = 900.0,
    tag: str = "",
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> MemoryReport:
    """Answer for a workload, which is run and recorded; for a run of `memory`; or for a snapshot file.

    `options` are the workload's size, phase and levers, as for `bench`. `record`: the stacks that are recorded (python,
    all, off); `stacks`: whole ones in the answer. `model`, of a snapshot: what was allocated before the recording is
    compared with its parameters' sizes. With `predict` nothing is run: the answers are a dry run's, for `gpu`.

    >>> flopwise.memory("tiny", device="cpu").devices[0].peak.owners     # doctest: +SKIP
    {'activations': 6219776, 'attention scores': 4227072, …}
    >>> flopwise.memory("2.7B", predict=True, gpu="h200").devices[0].peak.allocated_bytes     # doctest: +SKIP
    68394076672
    """
    asked_for = _workload(target, options)
    if asked_for is not None and predict:
        return _predicted(asked_for, gpu or ("cpu" if device == "cpu" else ""))
    if predict or gpu:
        what = (
            "gpu is for a prediction" if gpu and not predict else f"'{target}' is no workload, so nothing is predicted"
        )
        raise FlopwiseError(what, "for example: flopwise memory 2.7B --predict --gpu h200")
    if asked_for is None:
        if options:
            raise FlopwiseError(f"{next(iter(options))} means nothing to '{target}', which is no workload", "omit it")
        return _recorded(target, stacks, runs, model)
    if model:
        raise FlopwiseError(
            "model is for a snapshot's file", "for example: flopwise memory snapshot.pickle --model gpt2"
        )
    if tag:
        check_tag(tag)  # before anything is run
    root = runs_root(runs)
    run = capture(asked_for, device, record, root, command, progress or Progress(), steps=steps, timeout=timeout)
    if tag:
        tag_run(root, run.path, tag)
    return _answered(stored_report(run, stacks))


def _answered(found: MemoryReport) -> MemoryReport:
    """The report, if it is an answer: also one of a step that ran out of memory, where something was recorded until then."""
    if found.status == INTERRUPTED:
        raise Interrupted(found)
    if not found.devices:
        outcome(found)
    return found


def _workload(target: object, options: dict[str, Any]) -> Workload | None:
    """The workload that a target means; None: it is a run or a file."""
    if isinstance(target, Workload) or callable(target):
        return as_workload(target, options)
    if not isinstance(target, str | Path | StoredRun):
        hint = f"allowed: a run, a snapshot's file, {ALLOWED}"
        raise FlopwiseError(f"target = {fields.show(target)} is not allowed", hint)
    word = str(target)
    presets = {name.lower() for name in preset_names()}
    if word.startswith(_KINDS) or is_user_step(word) or (word.lower() in presets and not os.path.isfile(word)):
        return workload(word, **options)
    return None


def _recorded(target: object, stacks: bool, runs: str | Path | None, model: str) -> MemoryReport:
    """Of a run, or of a snapshot's file."""
    if isinstance(target, StoredRun):
        return stored_report(target, stacks)
    path = Path(str(target)).expanduser()
    if os.path.isfile(path) or path.name.lower().endswith(SUFFIXES):
        return report(read_snapshot(path), stacks, models=_parameter_sizes(model) if model else ())
    try:
        place = find(str(target), runs_root(runs))
    except FlopwiseError as error:
        raise FlopwiseError(
            f"'{target}' is no workload, no snapshot and no run", f"{error.hint}; presets: {', '.join(preset_names())}"
        ) from None
    return stored_report(StoredRun.load(place), stacks)


def _parameter_sizes(model: str) -> list[Sizes]:
    """The sizes of a model's parameters, in each way it may hold them: projections apart or joined."""
    asked_for = workload(model)
    if isinstance(asked_for.subject, ModelSpec):
        return [element_counts(weight_shapes(asked_for.subject, how).values()) for how in ("separate", "fused")]
    with Worker() as worker:
        return [element_counts(one.shape for one in worker.dry_run(asked_for, architecture_of(None)).weights)]


def capture(
    workload: Workload,
    device: str,
    record: str,
    root: Path,
    command: str,
    progress: Progress,
    *,
    steps: int,
    timeout: float,
    worker: Worker | None = None,
) -> StoredRun:
    """Run the workload in a process of its own, record its memory, predict it, and keep all of it.

    `worker`: one that is there already, for whoever records many workloads; it stays open.
    """
    fields.whole("steps", steps, 1, MOST_STEPS)
    fields.one_of("stacks", record, STACKS)
    trial = Trial(workload=workload, sampling=Sampling(timeout_s=timeout), device=device, group="memory")
    with contextlib.ExitStack() as stack:
        worker = worker or stack.enter_context(Worker())
        there = worker.look(device)  # no such device: say so before there is a run
        run = stack.enter_context(Run.create(root, "memory", workload.target, command, [trial]))
        path = run.memory_path(f"{trial.key()}.pickle").resolve()
        stack.callback(progress.end)
        progress.begin(1, 0)
        if warning := too_large(workload, there):
            progress.note(warning)
        progress.trial(trial)
        request = MemoryRequest(path=str(path), steps=steps, stacks=record)
        point = worker.run(trial, run.log_path(trial.key()), progress.event, memory=request)
        interrupted = point.status == INTERRUPTED  # then do not wait for a prediction
        gpu = gpu_of(there.environment)
        predicted = StoredPredictions() if interrupted else predict_memory(worker, workload, gpu)
        write_atomically(predictions_path(path), msgspec.json.encode(predicted))
        run.append(point)
        progress.point(point)
    return StoredRun.load(run.path)


def _predicted(asked_for: Workload, named: str) -> MemoryReport:
    if "," in named:
        raise FlopwiseError(f"gpu = '{named}' names several: one prediction is for one GPU", "name one: --gpu h200")
    if asked_for.many:
        formula = "flopwise account has it by formula, rank by rank; or " if asked_for.own_model is not None else ""
        hint = f"{formula}run it: omit --predict"
        raise FlopwiseError("a dry run is of one process, and this step is of several ranks", hint)
    gpu = gpu_named(named) if named else None
    check_fp8(asked_for, gpu)
    check_dry_run(asked_for)
    with Worker() as worker:
        run = worker.dry_run(asked_for, architecture_of(gpu))
    found = predicted_report(run, asked_for)
    title = gpu.title if gpu is not None else f"a GPU like {run.architecture}'s"
    notes: tuple[str, ...] = ()
    if gpu is not None and gpu.memory_bytes is not None:
        fits = "it fits" if found.devices[0].peak_reserved_bytes <= gpu.memory_bytes else "it does not fit"
        notes = (f"{title} has {gpu.memory_bytes / 1e9:.0f} GB: {fits}",)
    return msgspec.structs.replace(
        found,
        where=title,
        predictions=(*found.predictions, *memory_from_shapes(asked_for, gpu)),
        levers=memory_levers(asked_for, gpu),
        notes=notes,
    )


def outcome(found: MemoryReport) -> int:
    """The exit code: 0 recorded, 130 stopped by the user; raises what stood in the way."""
    if found.status not in (OK, INTERRUPTED):
        raise Failed(f"{found.label}: {found.status}: {found.reason}", found.hint, found)
    return 130 if found.status == INTERRUPTED else 0
