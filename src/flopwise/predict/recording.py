"""A user's step recorded beside other work: its dry runs take seconds, and a process of their own."""

import os
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError
from flopwise.predict.prediction import record_step
from flopwise.predict.recorded.step import RecordedStep
from flopwise.spec.gpu import Gpu
from flopwise.spec.workload import Workload

_NICE = 10  # other processes go first
_LONGEST_S = 60  # that anyone waits for it


class StepRecording:
    """Begins at once; `result()` is asked for when it is needed. `close()` ends it, done or not."""

    def __init__(self, workload: Workload, gpu: Gpu | None, allow: Sequence[str] = ()) -> None:
        self.workload, self.gpu, self.allow = workload, gpu, allow
        self._worker: Worker | None = None
        self._found: RecordedStep | None = None
        self._closed = False
        self._thread = Thread(target=self._record, daemon=True)
        self._thread.start()

    def result(self, wait_s: float = _LONGEST_S) -> RecordedStep | None:
        """What was recorded; None where the step cannot be dry-run, or not in that time."""
        self._thread.join(wait_s)
        return self._found

    def close(self) -> None:
        self._closed = True
        if self._worker is not None:
            self._worker.close()

    def _record(self) -> None:
        with suppress(FlopwiseError, OSError, ValueError):  # closed meanwhile
            self._worker = Worker(wait=False)
            with suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self._worker.process.pid, _NICE)
            if not self._closed:
                self._found = record_step(self._worker, self.workload, self.gpu, self.allow)
            self._worker.close()
