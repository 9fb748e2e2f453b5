"""Train a model on text: from the first byte to a checkpoint, measured on the way."""

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flopwise import signals
from flopwise.analysis.training import moves
from flopwise.errors import Damaged, Failed, FlopwiseError, Interrupted
from flopwise.lm.data import open_corpus
from flopwise.lm.ranks import ranks_here
from flopwise.predict.flops import model_flops
from flopwise.predict.machine import gpu_of
from flopwise.records.run import Environment
from flopwise.records.training import FAILED, STOPPED, Begun, Row, Settings, Steps, Stopped, Training
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Sampling, Trial, Workload, workload
from flopwise.store import Run, StoredRun, find, runs_root
from flopwise.store.rows import append_row
from flopwise.store.training import ROWS, corpus_folder, read_training
from flopwise.training.checkpoint import newest
from flopwise.training.constants import HIGHEST_RATE, LONGEST_WARMUP, RATE_TIMES_WIDTH
from flopwise.training.job import Job, check_text, corpus_of, job
from flopwise.training.progress import TrainingProgress
from flopwise.training.tensorboard import board, check_board

MOST, STEPS = 1_000_000_000, 1000


def train(
    target: str = "",
    *,
    text: Sequence[str | Path] | str | Path = (),
    data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    steps: int | None = None,
    rate: float | None = None,
    warmup_steps: int | None = None,
    clip: float | None = None,
    accumulate: int = 1,
    evaluate_every: int = 0,
    checkpoint_every: int = 0,
    log_every: int = 10,
    seed: int = 0,
    tensorboard: bool = False,
    resume: str | Path | None = None,
    device: str = "auto",
    runs: str | Path | None = None,
    command: str = "",
    progress: TrainingProgress | None = None,
    **options: Any,
) -> Training:
    """Train a preset or a config on `text`, or on `data`, a corpus prepared before; returns the stored run.

    With both, `text` is prepared into the folder `data`, for other runs; else into the run's own.
    `options` are the model's size and the levers, as for `bench`. `resume` goes on with a run from its last checkpoint, and
    takes everything else from it. Ctrl-C writes a checkpoint and raises KeyboardInterrupt; a loss that is not a number, too
    little memory or a full disk raise Failed. The `result` of both is the stored run. Under torchrun all processes train
    together (DDP), and the first writes.

    >>> flopwise.train("tiny", text="book.txt", steps=200, device="cpu").steps[-1].loss        # doctest: +SKIP
    2.31
    """
    told = progress or TrainingProgress()
    if resume is not None:
        fixed = {"rate": rate, "warmup_steps": warmup_steps, "clip": clip, "text": text, "data": data}
        fixed |= {"tokenizer": tokenizer, "model": target} | options
        fixed |= {"accumulate": accumulate, "evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
        fixed |= {"log_every": log_every, "seed": seed, "tensorboard": tensorboard}
        return _resumed(resume, steps, fixed, device, runs, told)
    work = _model(target or "tiny", options)
    assert isinstance(work.subject, ModelSpec)
    texts = [text] if isinstance(text, str | Path) else list(text)
    if not texts and data is None:
        raise FlopwiseError("there is nothing to train on", "flopwise train tiny --text book.txt --steps 200")
    if texts:
        check_text(texts, work.subject.vocab, tokenizer)
    given = {"steps": steps, "rate": rate, "warmup_steps": warmup_steps, "clip": clip}
    settings = Settings(
        **_defaults(work) | {name: value for name, value in given.items() if value is not None},
        data=_from_home(Path(data).resolve()) if data is not None else "",
        accumulate=accumulate,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        log_every=log_every,
        seed=seed,
        tensorboard=tensorboard,
    )
    settings = _checked(settings)
    check_board(tensorboard)
    trial = Trial(workload=work, sampling=Sampling(), device=device)
    with job(device) as here:
        settings = msgspec.structs.replace(settings, world=here.ranks.world)
        with _run_of_all(here, lambda: Run.create(runs_root(runs), "train", work.target, command, [trial])) as path:
            if texts:
                arguments = texts, tokenizer, work.subject.vocab, corpus_folder(path, settings), told.note
                here.ranks.first_does(lambda: corpus_of(*arguments).vocabulary)  # the others wait until it is there
            return _train(here, work, settings, path, None, told)


def _from_home(folder: Path) -> str:
    """A path without the user's name."""
    home = Path.home().resolve()
    return str("~" / folder.relative_to(home)) if folder.is_relative_to(home) else str(folder)


def first_process() -> bool:
    """Whether this process shows what is found: under torchrun only one does."""
    return ranks_here().first


def _resumed(
    run: str | Path, steps: int | None, given: dict[str, Any], device: str, runs: Any, told: TrainingProgress
) -> Training:
    """Go on with a run; only how long, and where, can be said anew."""
    path = find(run, runs_root(runs))
    StoredRun.load(path).sound()
    before = read_training(path)
    if before.warnings:
        hint = f"flopwise runs check --repair {path.name} leaves what is sound"
        raise Damaged(f"{path.name} is damaged: {before.warnings[0]}", hint)
    usual = msgspec.structs.asdict(Settings(steps=STEPS, data="", rate=0.0)) | dict.fromkeys(
        ("rate", "clip", "warmup_steps")
    )
    if said := [name for name, value in given.items() if value not in (None, (), "", {}, usual.get(name))]:
        text = f"--resume takes everything but --steps and --device from its run, and {', '.join(said)} is given too"
        raise FlopwiseError(text, "leave it out, or begin a new run")
    trial, settings = before.header.trials[0], before.begun.settings
    if steps is not None:
        settings = msgspec.structs.replace(settings, steps=steps)
    settings = _checked(settings)
    check_board(settings.tensorboard)
    last = newest(path)
    with job(trial.device if device == "auto" else device) as here:
        settings = msgspec.structs.replace(
            settings, world=here.ranks.world, accumulate=_shared(settings, here.ranks.world)
        )
        with _run_of_all(here, lambda: Run.reopen(path)):
            return _train(here, trial.workload, settings, path, last, told, before.begun)


def _shared(settings: Settings, world: int) -> int:
    """Batches that each of `world` processes accumulates, so that a step is of the same text as before."""
    batches = settings.accumulate * settings.world
    if batches % world:
        text = f"each step of this run is {batches} batch{'es' if batches > 1 else ''}, which {world} processes cannot share"
        raise FlopwiseError(text, f"resume it with {settings.world} process{'es' if settings.world > 1 else ''}")
    return batches // world


@contextlib.contextmanager
def _run_of_all(here: Job, make: Callable[[], Run]) -> Iterator[Path]:
    """The first process writes the run; all know where it is."""
    opened = list[Run]()

    def begin() -> Path:
        opened.append(make())
        return opened[0].path

    path = here.ranks.first_does(begin)
    if not opened:
        yield path
        return
    with opened[0] as run:
        try:
            yield path
        except FlopwiseError:
            if not (run.path / ROWS).exists():  # it came to nothing
                shutil.rmtree(run.path, ignore_errors=True)
            raise


def _train(
    here: Job,
    work: Workload,
    settings: Settings,
    path: Path,
    checkpoint: Path | None,
    told: TrainingProgress,
    *before: Begun,
) -> Training:
    told = told if here.ranks.first else TrainingProgress()
    corpus = open_corpus(corpus_folder(path, settings))
    parameters = here.build(work, settings, corpus)
    start = here.restore(checkpoint) if checkpoint is not None else 0
    if start >= settings.steps:
        raise FlopwiseError(f"{path.name} has all of its {settings.steps:,} steps", f"--steps {start * 2} trains on")
    begun = _begun(
        here.environment, work, settings, parameters, corpus.vocabulary, corpus.tokens("train"), str(here.device)
    )
    begun = msgspec.structs.replace(begun, step=start)

    def keep(row: Row) -> None:
        if here.ranks.first:
            append_row(path / ROWS, row)

    keep(begun)
    told.begin(begun, work)
    for line in moves(*before, begun):
        told.note(line)
    with _asked_to_stop() as stop, board(path, settings.tensorboard and here.ranks.first) as drawn:

        def on_steps(row: Steps) -> None:
            keep(row)
            drawn(row)
            told.steps(row)

        try:
            end = here.run(start, path, on_steps, stop)
        except FlopwiseError as error:
            keep(Stopped(status=FAILED, step=start, reason=error.message))
            if not here.ranks.first:
                raise
            raise Failed(error.message, error.hint, read_training(path)) from error
        finally:
            told.end()
    keep(end)
    here.ranks.told(None)  # no process reads before it is there
    found = read_training(path)
    if end.status == STOPPED:
        raise Interrupted(found)
    return found


def _begun(
    environment: Environment,
    work: Workload,
    settings: Settings,
    parameters: int,
    vocabulary: int,
    tokens: int,
    device: str,
) -> Begun:
    assert isinstance(work.subject, ModelSpec)
    gpu = gpu_of(environment)
    peak = gpu.peak(work.recipe.linear) if gpu is not None and environment.gpu is not None else None
    batches = settings.accumulate * settings.world
    return Begun(
        settings=settings,
        parameters=parameters,
        vocabulary=vocabulary,
        tokens=tokens,
        flops_per_step=float(model_flops(work.subject, work.batch, work.context).total * batches),
        peak_flops_s=peak * settings.world if peak else None,
        device=device,
        environment=environment,
    )


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP are noticed after a step, when its checkpoint can be written; a second one ends at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signals.handle(note, signal.SIGINT)
    try:
        yield asked.is_set
    finally:
        signals.restore(before)


def _model(target: str, options: dict[str, Any]) -> Workload:
    """The workload, which has to be a model, and to train it."""
    if options.get("phase", "train") != "train":
        raise FlopwiseError(f"phase = {fields.show(options['phase'])} trains nothing", "leave it out")
    work = workload(target, **options)
    if not isinstance(work.subject, ModelSpec):
        raise FlopwiseError(f"{work.target} is no language model of ours", "train a preset or hf:PATH/config.json")
    return work


def _defaults(work: Workload) -> dict[str, Any]:
    """What depends on the model; the warm-up, on the number of steps, comes later."""
    assert isinstance(work.subject, ModelSpec)
    rate, clip = min(HIGHEST_RATE, RATE_TIMES_WIDTH / work.subject.d_model), float(work.recipe.overlap == "off")
    return {"steps": STEPS, "rate": rate, "clip": clip, "warmup_steps": -1}


def _checked(settings: Settings) -> Settings:
    """The same with a warm-up, where none is given."""
    fields.whole("steps", settings.steps, 1, MOST)
    if settings.warmup_steps == -1:
        settings = msgspec.structs.replace(settings, warmup_steps=min(LONGEST_WARMUP, settings.steps // 10))
    fields.number("rate", settings.rate, 0.0, 10.0)
    fields.whole("warmup_steps", settings.warmup_steps, 0, MOST)
    fields.number("clip", settings.clip, 0.0, 1e9)
    for name in ("accumulate", "log_every", "evaluation_batches", "world"):
        fields.whole(name, getattr(settings, name), 1, 1_000_000)
    for name in ("evaluate_every", "checkpoint_every"):
        fields.whole(name, getattr(settings, name), 0, MOST)
    fields.whole("seed", settings.seed, 0, 2**63)
    return settings
