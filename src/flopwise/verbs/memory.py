"""Who holds every byte of a GPU's memory: from a snapshot, ours or anyone's."""

from pathlib import Path

from flopwise.errors import FlopwiseError
from flopwise.memory.answers import MemoryReport
from flopwise.memory.read import read_snapshot
from flopwise.memory.report import report

SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")


def memory(target: str | Path, *, stacks: bool = False) -> MemoryReport:
    """Answer for a snapshot that `torch.cuda.memory._dump_snapshot` wrote, plain or gzipped; `stacks`: with whole stacks.

    >>> flopwise.memory("snapshot.pickle").devices[0].peak.owners        # doctest: +SKIP
    {'parameters': 12884901888, 'activations': 9663676416, …}
    """
    path = Path(target).expanduser()
    if path.is_file() or path.name.lower().endswith(SUFFIXES):
        return report(read_snapshot(path), stacks)
    return report(read_snapshot(_captured(str(target))), stacks)


def _captured(workload: str) -> Path:
    """The snapshot of a workload's own step. Here capture comes in: run it, write a snapshot, return its path."""
    raise FlopwiseError(
        f"'{workload}' is no snapshot, and capturing a workload's memory is not built yet",
        "record with torch.cuda.memory._record_memory_history(), write with _dump_snapshot('snapshot.pickle')",
    )
