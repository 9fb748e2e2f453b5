"""Who holds every byte of memory: of a workload's own steps, of a stored run, of anyone's snapshot; or foretold."""

import os
from pathlib import Path
from typing import Any

import msgspec

from flopwise.api.memory_run import capture, stored_report
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.predict.dry_step import architecture_of
from flopwise.predict.forecast import closed_form
from flopwise.predict.memory_levers import memory_levers
from flopwise.records.run import INTERRUPTED
from flopwise.snapshot.answers import MemoryReport
from flopwise.snapshot.predicted import predicted_report
from flopwise.snapshot.read import read_snapshot
from flopwise.snapshot.report import report
from flopwise.spec.gpu import Gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.model import preset_names
from flopwise.spec.workload import Workload, workload
from flopwise.store import StoredRun, check_tag, find, runs_root
from flopwise.store import tag as tag_run

SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
_KINDS = ("op:", "py:", "hf:")


def memory(
    target: str | Path | Workload | StoredRun,
    *,
    device: str = "auto",
    steps: int = 3,
    record: str = "python",
    stacks: bool = False,
    predict: bool = False,
    gpu: str = "",
    timeout: float = 900.0,
    tag: str = "",
    runs: str | Path | None = None,
    command: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> MemoryReport:
    """Answer for a workload, whose steps are run and recorded; for a run of `memory`; or for a snapshot file.

    `options` are the workload's size, phase and levers, as for `bench`. `record`: the stacks that are recorded (python,
    all, off); `stacks`: whole ones in the answer. With `predict` nothing is run: the answers are a dry run's, for `gpu`.

    >>> flopwise.memory("tiny", device="cpu").devices[0].peak.owners     # doctest: +SKIP
    {'activations': 6219776, 'attention scores': 4227072, …}
    >>> flopwise.memory("2.7B", predict=True, gpu="h200").devices[0].peak.allocated_bytes     # doctest: +SKIP
    68394076672
    """
    asked_for = _workload(target, options)
    if asked_for is not None and predict:
        if device != "auto" and not gpu:
            gpu = "cpu" if device == "cpu" else ""
        if "," in gpu:
            raise FlopwiseError(f"gpu = '{gpu}' names several: one prediction is for one GPU", "name one: --gpu h200")
        return _predicted(asked_for, gpu_named(gpu) if gpu else None)
    if predict or gpu:
        what = (
            "gpu is for a prediction" if gpu and not predict else f"'{target}' is no workload, so nothing is predicted"
        )
        raise FlopwiseError(what, "for example: flopwise memory 2.7B --predict --gpu h200")
    if asked_for is not None:
        if tag:
            check_tag(tag)  # before anything is run
        run = capture(
            asked_for, device=device, steps=steps, record=record, timeout=timeout, root=runs_root(runs), command=command,
            progress=progress or Progress(),
        )  # fmt: skip
        if tag:
            tag_run(runs_root(runs), run.path, tag)
        found = stored_report(run, stacks)
        if found.status == INTERRUPTED:
            raise Interrupted(found)
        return found
    if options:
        raise FlopwiseError(f"{next(iter(options))} means nothing to '{target}', which is no workload", "leave it out")
    if isinstance(target, StoredRun):
        return stored_report(target, stacks)
    path = Path(str(target)).expanduser()
    if os.path.isfile(path) or path.name.lower().endswith(SUFFIXES):
        return report(read_snapshot(path), stacks)
    return stored_report(StoredRun.load(_found(str(target), runs)), stacks)


def _workload(target: object, options: dict[str, Any]) -> Workload | None:
    """The workload that a target means; None: it is a run or a file."""
    if isinstance(target, Workload):
        return target
    word = str(target)
    presets = {name.lower() for name in preset_names()}
    if word.startswith(_KINDS) or (word.lower() in presets and not os.path.isfile(word)):
        return workload(word, **options)
    return None


def _found(ref: str, runs: str | Path | None) -> Path:
    try:
        return find(ref, runs_root(runs))
    except FlopwiseError as error:
        raise FlopwiseError(
            f"'{ref}' is no workload, no snapshot and no run", f"{error.hint}; presets: {', '.join(preset_names())}"
        ) from None


def _predicted(asked_for: Workload, gpu: Gpu | None) -> MemoryReport:
    with Worker() as worker:
        run = worker.dry_run(asked_for, architecture_of(gpu))
    found = predicted_report(run, asked_for)
    closed = closed_form(asked_for, gpu)
    title = gpu.title if gpu is not None else f"a GPU like {run.architecture}'s"
    notes: tuple[str, ...] = ()
    if gpu is not None and gpu.memory_bytes is not None:
        left = gpu.memory_bytes - found.devices[0].peak_reserved_bytes
        fits = "it fits" if left >= 0 else "it does not fit"
        notes = (f"{title} has {gpu.memory_bytes / 1e9:.0f} GB: {fits}",)
    return msgspec.structs.replace(
        found,
        where=title,
        predictions=(*found.predictions, *((closed,) if closed else ())),
        levers=memory_levers(asked_for, gpu),
        notes=notes,
    )
