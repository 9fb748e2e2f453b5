"""The explanations of several devices of one job, put together."""

from collections.abc import Sequence
from statistics import median

from flopwise.analysis.explanation import Explanation
from flopwise.records.together import Together
from flopwise.trace.tables import NO_ID
from flopwise.work.operation import COMMUNICATION

WORTH_NAMING = 0.05  # of a step: waits shorter than this may be chance
_ALIKE = 0.1  # relative difference in the number of collectives of ranks of one job


def device_names(explained: Sequence[Explanation]) -> list[str]:
    """Each device by its number; by its process too, where processes number their own.

    >>> device_names([])
    []
    """
    numbers = [e.device for e in explained]
    apart = len(set(numbers)) == len(numbers)
    return [f"device {e.device}{'' if apart or e.process == NO_ID else f' of process {_pid(e)}'}" for e in explained]


def _pid(e: Explanation) -> int:
    """The system's number; Nsight Systems writes it with that of the machine before and the thread's after it."""
    return (e.process >> 24) & 0xFFFFFF if e.source == "nsys" else e.process


def together(names: Sequence[str], explained: Sequence[Explanation]) -> Together:
    """How far apart the devices' steps are, and for which the others wait.

    A collective ends for all at once and begins for each when it comes: who comes last communicates the shortest time.
    """
    times = [e.window_ns for e in explained]
    found = Together(devices=len(names), shortest_ns=min(times), longest_ns=max(times))
    parts = [next((s for s in e.classes if s.name == COMMUNICATION), None) for e in explained]
    spent = [(part.gpu_ns, part.count) for part in parts if part is not None]
    if len(spent) < max(len(names), 2):
        return found
    counts = [count for _, count in spent]
    last = min(range(len(spent)), key=lambda i: spent[i][0])
    its, others = spent[last][0], median(ns for i, (ns, _) in enumerate(spent) if i != last)
    if max(counts) > (1 + _ALIKE) * min(counts) or others - its < WORTH_NAMING * median(times):
        return found
    return Together(
        devices=found.devices,
        shortest_ns=found.shortest_ns,
        longest_ns=found.longest_ns,
        waited_for=names[last],
        its_communication_ns=its,
        others_communication_ns=others,
    )
