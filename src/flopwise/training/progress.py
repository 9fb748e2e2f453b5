"""What a training tells on the way."""

from flopwise.records.training import Begun, Steps
from flopwise.spec.workload import Workload


class TrainingProgress:
    """What is told on the way; this one tells nothing."""

    def note(self, text: str) -> None: ...

    def begin(self, begun: Begun, workload: Workload) -> None: ...

    def steps(self, row: Steps) -> None: ...

    def end(self) -> None: ...
