"""PyTorch's profiler around some steps of a loop that is not ours."""

import os
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerAction

from flopwise.capture.loop.models import namable
from flopwise.capture.ranges import named_modules
from flopwise.capture.step import synchronise

_LOG_LEVEL = "KINETO_LOG_LEVEL"


class Tracer:
    """Records from its making, or with `warm_up` after one more step under the profiler, until `steps` have ended."""

    def __init__(
        self, path: Path, device: torch.device, roots: list[nn.Module], steps: int, *, warm_up: bool, shapes: bool
    ) -> None:
        self.path, self.device, self.steps, self.step_ns, self.done = path, device, steps, 0, False
        self._ended, self._first = 0, int(warm_up)
        self._partial = path.with_name(f"partial-{path.name}")
        self._open = ExitStack()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = torch.profiler.profile(
            activities=kinds, schedule=self._action, record_shapes=shapes, on_trace_ready=self._export
        )
        for root in namable(roots):
            self._open.enter_context(named_modules(root))
        if _LOG_LEVEL not in os.environ:  # the profiler's own log would stand between the script's lines
            os.environ[_LOG_LEVEL] = "99"
            self._open.callback(os.environ.pop, _LOG_LEVEL, None)
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # there is one cycle: nothing is cleared
        synchronise(device)
        self._profiler.start()
        self._open.callback(self._profiler.stop)
        self._begun = time.perf_counter_ns()

    def step(self) -> bool:
        """At the end of a step; whether it was the last."""
        self._ended += 1
        last = self._ended == self._first + self.steps
        if last or self._ended == self._first:
            synchronise(self.device)
            now = time.perf_counter_ns()
            self.step_ns, self._begun = (now - self._begun) // self.steps if last else 0, now
        self.done = last
        self._profiler.step()
        if last:
            self._partial.replace(self.path)  # whole or not at all
        return last

    def close(self) -> None:
        """Without a trace, if it did not come to its end."""
        self._open.close()
        self._partial.unlink(missing_ok=True)

    def _action(self, step: int) -> ProfilerAction:
        if step < self._first:
            return ProfilerAction.WARMUP
        left = self._first + self.steps - step
        return {1: ProfilerAction.RECORD_AND_SAVE}.get(left, ProfilerAction.RECORD if left > 1 else ProfilerAction.NONE)

    def _export(self, profiler: torch.profiler.profile) -> None:
        if self.done:
            profiler.export_chrome_trace(str(self._partial))
