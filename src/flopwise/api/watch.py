"""A training loop watched as it is: its steps are found and timed, a few are traced, and the run says why they are slow."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from flopwise import signals
from flopwise.advice.explained import explained_run
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation
from flopwise.analysis.measured import MeasuredRun
from flopwise.errors import FlopwiseError
from flopwise.records.run import OK, Environment, Point, Ran
from flopwise.scratch import Scratch
from flopwise.spec import fields
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Sampling, Trial, UserStep, Workload
from flopwise.store import Run, check_root, runs_root

if TYPE_CHECKING:
    from flopwise.capture.loop.watcher import Looked, LoopWatcher

_MORE = "a loop needs a dozen steps, each with an optimizer's step or watch.step()"
TRACE = "rank{}.kineto.json.gz"


def watch(
    batches: Iterable[Any] | None = None,
    *,
    steps: int | None = None,
    traced: int = 2,
    name: str = "loop",
    runs: str | Path | None = None,
) -> "Watch":
    """Watch a training loop: as a context manager, as an iterator around its batches, or with `step()` at each step's end.

    `steps` are timed (None: as many as are needed), then `traced` are traced; after that the loop runs as if unwatched.

    >>> with flopwise.watch() as watch:                # doctest: +SKIP
    ...     for batch in loader:
    ...         model(batch).loss.backward(); optimizer.step(); optimizer.zero_grad()
    >>> print(watch.report())                          # doctest: +SKIP
    """
    return Watch(batches, steps=steps, traced=traced, name=name, runs=runs)


class Watch:
    """One look at one loop. `run` is the stored run once the look is over, on the first rank."""

    def __init__(
        self,
        batches: Iterable[Any] | None = None,
        *,
        steps: int | None = None,
        traced: int = 2,
        seconds: float = 20.0,
        name: str = "loop",
        kind: str = "watch",
        command: str = "",
        runs: str | Path | None = None,
        note: Callable[[str], None] = lambda text: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`then` is called in the loop when the look is over."""
        if steps is not None:
            fields.whole("steps", steps, 1, 100_000)
        fields.whole("traced", traced, 0, 100)
        fields.number("seconds", seconds, 0.1, 86_400)
        signals.interruptible()
        self.batches, self.name, self.kind, self.command, self.runs = batches, name, kind, command, runs
        self.steps, self.traced, self.seconds, self.note, self.then = steps, traced, seconds, note, then
        self.run: MeasuredRun | None = None
        self.exit_code: int | None = None
        self.busy_cores = 0.0  # in use by others before the loop began, where someone looked
        self._watcher: LoopWatcher | None = None
        self._folder, self._process = "", 0
        self._scratch: Scratch | None = None
        self._environment: Environment | None = None
        self._began, self._stored = time.time(), False
        self._path: Path | None = None  # of the run, once something is in it

    # --- the three ways to use it

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        if self.batches is None:
            raise FlopwiseError("there is nothing to iterate over", "for batch in flopwise.watch(loader): …")
        try:
            with self:
                yield from self.batches
        finally:
            self.show()

    def step(self) -> None:
        """Where a step ends: for a loop without an optimizer of torch, or with steps of its own kind."""
        if self._watcher is None:
            raise FlopwiseError("the loop is not watched yet", "with flopwise.watch() as watch: … watch.step()")
        self._watcher.step()

    def report(self) -> Explanation | HostExplanation | MeasuredRun:
        """Where the time of a step went, and what to change; of a loop that ended before a step was traced, its run."""
        if self.run is None:
            raise FlopwiseError(self.missing(), _MORE)
        return explained_run(self.run) or self.run

    def screen(self) -> str:
        """The same on one screen, as `flopwise run` shows it."""
        if self.run is None:
            raise FlopwiseError(self.missing(), _MORE)
        return str(self.run)

    def show(self) -> None:
        """End the look and print its screen, on the first rank; a look that found nothing is one line, and no error."""
        self.close()
        if not self.first_rank or not self._mine:
            return
        try:
            print(self.screen())  # noqa: T201
        except FlopwiseError as error:
            print(f"flopwise: {error.message}")  # noqa: T201

    @property
    def over(self) -> bool:
        """Whether enough was seen."""
        return self._stored

    # --- from the beginning to the end

    def open(self) -> None:
        """Begin to watch: torch is imported now, if it was not."""
        from flopwise.capture.loop.watcher import Look, LoopWatcher  # torch

        self.check_place()
        self._scratch = Scratch()
        self._folder = str(self._scratch.path)
        self._process = os.getpid()
        look = Look(steps=self.steps, traced=self.traced, seconds=self.seconds)
        path = Path(self._folder) / TRACE.format(_rank())
        note = self.note if self.first_rank else (lambda text: None)
        self._watcher = LoopWatcher(look, lambda: path, self._over, self._timed, note, ranks=_ranks())
        self._watcher.open()

    def check_place(self) -> None:
        """Raise now if no run could be stored in the end."""
        if self.first_rank:
            check_root(runs_root(self.runs))

    @property
    def _mine(self) -> bool:
        """Not in a process that the loop forked."""
        return self._process in (0, os.getpid())

    def close(self) -> None:
        """End the look, wherever it is; what was timed until now is stored. A forked process leaves it alone."""
        if not self._mine:
            return
        if self._watcher is not None:
            self._watcher.close()
            if not self._stored:
                self._store({})
        if self._scratch is not None:
            self._scratch.close()

    @property
    def first_rank(self) -> bool:
        return _rank() == 0

    @property
    def alone(self) -> bool:
        """Whether it is the only rank."""
        return _ranks() == 1

    def missing(self) -> str:
        """Why there is no run."""
        if self._watcher is None:
            return "torch was never imported"
        if self._watcher.looked.problem:
            return self._watcher.looked.problem
        seen = self._watcher.steps
        return f"{seen} steps were seen, too few to time any" if seen else "no step of an optimizer was seen"

    def _over(self) -> None:
        from flopwise.capture.loop.ranks import gathered  # torch

        assert self._watcher is not None
        looked, trace = self._watcher.looked, Path(self._folder) / TRACE.format(_rank())
        told = {
            "walls": looked.phases[0].wall_ns if looked.phases else (),
            "trace": str(trace) if looked.traced else "",
        }
        self._store(gathered(told))
        gathered({})  # no rank takes its trace away before the first has it
        self.then()

    def _timed(self) -> None:
        """Before anything is traced, and now and then while steps are timed: that outlives a kill."""
        self._write("", {}, {})

    def _store(self, ranks: dict[int, dict[str, Any]]) -> None:
        """The run, by the first rank; the others' traces are put beside its own."""
        assert self._watcher is not None
        self._stored, looked = True, self._watcher.looked
        traces = {rank: told["trace"] for rank, told in ranks.items() if told["trace"]}
        if looked.traced:
            traces[0] = str(Path(self._folder) / TRACE.format(0))
        walls = {rank: tuple(told["walls"]) for rank, told in ranks.items() if rank != 0}
        self._write(TRACE.format(0) if looked.traced else "", traces, walls)
        if self._path is not None:
            self.run = MeasuredRun.load(self._path)

    def _write(self, trace: str, traces: dict[int, str], walls: dict[int, tuple[int, ...]]) -> None:
        """A row of what is known by now; the one before it counts no more."""
        assert self._watcher is not None
        looked = self._watcher.looked
        if not looked.phases or _rank() != 0:
            return
        trial = self._trial(looked)
        new = partial(Run.create, runs_root(self.runs), self.kind, self.name, self.command, [trial])
        with new() if self._path is None else Run.reopen(self._path) as run:
            self._path = run.path
            for rank, path in traces.items():
                if os.path.exists(path):
                    shutil.move(path, run.trace_path(TRACE.format(rank)))
            run.append(self._point(trial, looked, trace, walls))

    def _trial(self, looked: "Looked") -> Trial:
        work = Workload(
            target=self.name, subject=UserStep(reference=self.name), batch=1, context=1, phase="train", recipe=Recipe()
        )
        sampling = Sampling(seconds=self.seconds, samples=self.steps)
        return Trial(workload=work, sampling=sampling, device=looked.device.partition(":")[0], group=self.kind)

    def _point(self, trial: Trial, looked: "Looked", trace: str, walls: dict[int, tuple[int, ...]]) -> Point:
        from flopwise.capture.loop.ranks import environment_of  # torch

        self._environment = self._environment or environment_of(looked.device)
        return Point(
            key=trial.key(),
            trial=trial,
            status=OK,
            phases=looked.phases,
            warmup_ns=looked.warmup_ns,
            warmup_rule=looked.warmup_rule,
            stopped="samples" if self.steps else "budget",
            memory=looked.memory,
            ran=Ran(device=looked.device, parameters=looked.parameters),
            environment=self._environment,
            busy_cores=self.busy_cores if looked.busy_cores is None else looked.busy_cores,
            trace_file=trace,
            traced_step_ns=looked.traced_step_ns,
            loop=msgspec.structs.replace(looked.loop, rank_walls_ns=walls, exit_code=self.exit_code),
            started_at=datetime.fromtimestamp(self._began, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            elapsed_s=round(time.time() - self._began, 3),
        )


def _rank() -> int:
    return _number("RANK", 0)


def _ranks() -> int:
    return max(1, _number("WORLD_SIZE", 1))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default
