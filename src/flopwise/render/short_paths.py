"""Files' names for people: as much of the path as tells them apart."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def short_paths(paths: Sequence[str]) -> list[str]:
    """The last part of each path, with as many folders before it as it takes; the same file twice is numbered.

    >>> short_paths(["runs/a/trace.json", "runs/b/trace.json", "step.json"])
    ['a/trace.json', 'b/trace.json', 'step.json']
    >>> short_paths(["a/t.json", "a/t.json"])
    ['t.json', 't.json #2']
    """
    parts = {path: Path(path).parts for path in paths}
    shown: dict[str, str] = {}
    for length in range(1, max((len(found) for found in parts.values()), default=0) + 1):
        ends = {
            path: "/".join(found[-length:]).replace("//", "/") for path, found in parts.items() if path not in shown
        }
        times = Counter((*ends.values(), *shown.values()))
        shown |= {path: end for path, end in ends.items() if times[end] == 1}
    seen: Counter[str] = Counter()
    labels = []
    for path in paths:
        seen[path] += 1
        label = shown.get(path, path)
        labels.append(label if seen[path] == 1 else f"{label} #{seen[path]}")
    return labels
