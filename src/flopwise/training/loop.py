"""The loop: batches in, updates, rows out. It waits for the device only where a row is written."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flopwise.errors import FlopwiseError, one_line
from flopwise.lm.data import Corpus
from flopwise.lm.data.batches import Batches
from flopwise.lm.ranks import Ranks
from flopwise.records.corpus import EVALUATION
from flopwise.records.training import FINISHED, STOPPED, Settings, Steps, Stopped
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload
from flopwise.training import checkpoint
from flopwise.training.step import TrainingStep

OnSteps = Callable[[Steps], None]


class Loop:
    """One run of training in this process."""

    def __init__(
        self, workload: Workload, settings: Settings, corpus: Corpus, device: torch.device, ranks: Ranks
    ) -> None:
        assert isinstance(workload.subject, ModelSpec)
        self.spec, self.settings, self.device, self.ranks = workload.subject, settings, device, ranks
        if corpus.vocabulary > self.spec.vocab:
            text = (
                f"the corpus has tokens up to {corpus.vocabulary:,}, and the model's vocabulary is {self.spec.vocab:,}"
            )
            raise FlopwiseError(text, f"--set vocab={corpus.vocabulary}")
        sizes: dict[str, Any] = {"batch": workload.batch, "context": workload.context, "device": device}
        shares: dict[str, Any] = {"seed": settings.seed, "rank": ranks.rank, "world": ranks.world}
        self.batches = Batches(corpus, **sizes, **shares)
        shares["seed"] = 0  # held-out text is the same for every seed, so that runs compare
        self.held_out = Batches(corpus, EVALUATION, **sizes, **shares) if corpus.tokens(EVALUATION) else None
        torch.manual_seed(settings.seed)
        self.step = TrainingStep(workload, device, settings)
        self.clock = _Clock(device)
        self._losses = torch.zeros(2, settings.log_every, device=device)  # and norms, of the steps since the last row
        self._count = 0

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.step.model.parameters())

    def restore(self, path: Path) -> int:
        """Go on from a checkpoint; returns its step."""
        _, step, state = checkpoint.read(path, self.spec)
        try:
            self.step.restore(state)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            text = f"{path} does not fit the run's model and optimizer: {one_line(str(error), 100)}"
            raise FlopwiseError(text, "remove it, and --resume takes the one before it") from None
        return step

    def run(self, start: int, folder: Path, on_steps: OnSteps, stop: Callable[[], bool]) -> Stopped:
        """Train from the step after `start` to the last; `folder` is where checkpoints go. `stop` is asked after every row."""
        s = self.settings
        with self.batches.stream(start * s.accumulate) as stream:
            self.clock.restart()
            for number in range(start + 1, s.steps + 1):
                self._one(stream)
                due = _due(number, s.evaluate_every, s.steps)
                keeps = _due(number, s.checkpoint_every, s.steps)
                logs = number % s.log_every == 0 or number == start + 1  # the first compiles, and so stands alone
                leaves = self._leaves(stop, logs)
                if not (due or keeps or leaves or logs):
                    continue
                self._row(number, due, on_steps)
                if keeps or leaves:
                    self._save(folder, number)
                if leaves and number < s.steps:
                    return Stopped(status=STOPPED, step=number, reason="interrupted")
                self.clock.restart()
        return Stopped(status=FINISHED, step=s.steps)

    def _one(self, stream: Any) -> None:
        taken = []
        for _ in range(self.settings.accumulate):
            taken.append(next(stream))
            self.clock.waited_ns += int(stream.waited_seconds * 1e9)
        with self.clock.step():
            self.step.train_on(taken)
            self._losses[0, self._count].copy_(self.step.last_loss)
            self._losses[1, self._count].copy_(self.step.norm)
        self._count += 1

    def _leaves(self, stop: Callable[[], bool], logs: bool) -> bool:
        """Whether to end after this step: all processes together, so several agree where they write a row anyway."""
        if self.ranks.world == 1:
            return stop()
        if not logs:
            return False
        return bool(self.ranks.mean(torch.tensor(float(stop()), device=self.device)) > 0)

    def _row(self, number: int, evaluates: bool, on_steps: OnSteps) -> None:
        wall_ns, gpu_ns, behind_ns = self.clock.stopped()
        losses, norms = self.ranks.mean(self._losses[:, : self._count].clone()).tolist()
        self._count = 0
        bad = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), None)
        evaluation = self._evaluate() if evaluates and bad is None and self.held_out is not None else None
        on_gpu = self.device.type == "cuda"
        on_steps(
            Steps(
                step=number,
                losses=tuple(loss if math.isfinite(loss) else None for loss in losses),
                norms=tuple(norm if math.isfinite(norm) else None for norm in norms) if self.settings.clip else (),
                rate=self.step.learning_rate(number),
                wall_ns=wall_ns,
                waited_ns=self.clock.waited_ns,
                launched_ns=self.clock.launched_ns,
                gpu_ns=gpu_ns,
                behind_ns=behind_ns,
                memory_bytes=torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
                evaluation=evaluation,
            )
        )
        if bad is not None:
            first = number - len(losses) + 1 + bad
            raise FlopwiseError(
                f"the loss of step {first} is not a number",
                "try a lower --rate, a longer --warmup-steps or --clip 1; the run's checkpoints are of steps before it",
            )

    def _evaluate(self) -> float:
        assert self.held_out is not None
        numbers = range(min(self.settings.evaluation_batches, max(1, self.held_out.per_epoch)))
        mean = self.step.evaluate([self.held_out.at(number) for number in numbers])
        return float(self.ranks.mean(mean))

    def _save(self, folder: Path, number: int) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.step.model.parameters()):
            raise FlopwiseError(
                f"the update of step {number} made weights that are not numbers: no checkpoint is written",
                "try a lower --rate, a longer --warmup-steps or --clip 1; the run's checkpoints are of steps before it",
            )
        if self.ranks.first:
            checkpoint.save(folder, number, self.spec, self.step.state())


class _Clock:
    """Three clocks since the last restart: the wall's, the host's inside steps, and the GPU's."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self.waited_ns = self.launched_ns = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun_ns = time.perf_counter_ns()

    @contextmanager
    def step(self) -> Iterator[None]:
        begun_ns, begin = time.perf_counter_ns(), self._mark()
        yield
        end = self._mark()
        if begin is not None and end is not None:
            self._events.append((begin, end))
        self.launched_ns += time.perf_counter_ns() - begun_ns

    def _mark(self) -> torch.cuda.Event | None:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stopped(self) -> tuple[int, int | None, int | None]:
        """Nanoseconds on the wall and on the GPU, and how long the GPU went on after the last launch."""
        launched_ns = time.perf_counter_ns()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        end_ns = time.perf_counter_ns()
        if not self.on_gpu:
            return end_ns - self._begun_ns, None, None
        gpu_ms = sum(begin.elapsed_time(end) for begin, end in self._events)
        return end_ns - self._begun_ns, round(gpu_ms * 1e6), end_ns - launched_ns


def _due(number: int, every: int, last: int) -> bool:
    return number == last or (every > 0 and number % every == 0)
