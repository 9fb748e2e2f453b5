"""What changed from one trace to another, kernel by kernel."""

from dataclasses import dataclass

from flopwise.analysis.explanation import Explanation, Kernel
from flopwise.work.kernel_spelling import one_spelling


@dataclass(frozen=True)
class Change:
    """One kernel in two traces, nanoseconds per step."""

    name: str
    kind: str
    before_ns: float
    after_ns: float
    before_count: float
    after_count: float

    @property
    def saved_ns(self) -> float:
        return self.before_ns - self.after_ns


def changes(before: Explanation, after: Explanation) -> list[Change]:
    """What changed from one trace to the other, kernel by kernel, the largest saving first.

    Profilers spell kernels' names in their own ways; across two of them, the names are compared in one spelling."""
    spelt = str if before.source == after.source else one_spelling
    pairs: dict[str, tuple[list[Kernel], list[Kernel]]] = {}
    for side, one in enumerate((before, after)):
        for kernel in one.kernels:
            pairs.setdefault(spelt(kernel.name), ([], []))[side].append(kernel)
    found = [
        Change(
            name=(old or new)[0].name,
            kind=(old or new)[0].kind,
            before_ns=sum(kernel.gpu_ns for kernel in old),
            after_ns=sum(kernel.gpu_ns for kernel in new),
            before_count=sum(kernel.count for kernel in old),
            after_count=sum(kernel.count for kernel in new),
        )
        for old, new in pairs.values()
    ]
    return sorted(found, key=lambda change: -change.saved_ns)
