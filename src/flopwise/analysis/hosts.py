"""Where points were measured: times of two machines, drivers or versions of torch are no comparison of two workloads.

Two environments differ where a field that a time depends on is known of both and not the same: the GPU and its driver (without
a GPU, the CPU and its cores), torch and its CUDA. The host does not count, as a cluster's nodes are many and alike; nor do
Python, flopwise, the commit or the variables set, which a user may change on purpose.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, compress

from flopwise.records.run import Environment, Point

_MOST_NAMED = 4


def host(point: Point) -> str:
    """The cluster's node; '' where it was measured on the machine itself."""
    return point.environment.host if point.environment is not None else ""


def several_hosts(points: Sequence[Point]) -> str:
    """Says that points come from several hosts, with the GPU and driver of each; '' where they do not."""
    found: dict[str, list[Point]] = {}
    for point in points:
        if point.environment is not None:
            found.setdefault(host(point), []).append(point)
    if len(found) < 2:
        return ""
    named = [f"{name or 'this machine'} ({_described(on)})" for name, on in sorted(found.items())]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    listed = ", ".join(named[:_MOST_NAMED])
    return f"points come from {len(found)} hosts: {listed}{more}; only those of one host compare exactly"


def different_hosts(pairs: Sequence[tuple[Point, Point]]) -> str:
    """Says that A and B were measured on different hosts, and how often; '' where they were not."""
    apart = [(a, b) for a, b in pairs if a.environment and b.environment and host(a) != host(b)]
    if not apart:
        return ""
    a, b = ((host(point) or "this machine") for point in apart[0])
    which = "" if len(pairs) == 1 else f" of {len(apart)} of {len(pairs)} pairs"
    return f"A and B{which} come from different hosts ({a}, {b}): a difference may be the machine's"


def _fields(there: Environment) -> dict[str, str]:
    """What a time depends on, each as it is said; '' where it is not known."""
    gpu = there.gpu
    machine = {"machine": gpu.name if gpu is not None else there.cpu}
    machine |= {"driver": f"driver {gpu.driver}" if gpu is not None and gpu.driver else ""}
    machine |= {"cores": f"{there.cpu_cores} cores" if gpu is None and there.cpu_cores else ""}
    versions = {"torch": there.torch, "CUDA": there.cuda}
    return machine | {name: f"{name} {version}" if version else "" for name, version in versions.items()}


def differing(a: Environment, b: Environment) -> tuple[str, str] | None:
    """What differs between two environments, of each; None where nothing that is known of both does."""
    one, two = _fields(a), _fields(b)
    if (a.gpu is None) != (b.gpu is None):
        one["machine"], two["machine"] = one["machine"] or "a CPU", two["machine"] or "a CPU"
    apart = [name for name in one if one[name] and two[name] and one[name] != two[name]]
    return (", ".join(one[name] for name in apart), ", ".join(two[name] for name in apart)) if apart else None


def elsewhere(points: Sequence[Point], here: Environment) -> tuple[str, str] | None:
    """What differs between here and where most points were measured; None where some were measured in one like this."""
    found = [differing(point.environment, here) for point in points if point.environment is not None]
    return None if None in found else next((apart for apart, _ in Counter(found).most_common(1)), None)


def measured_with(point: Point) -> str:
    """What a point's times depend on: the GPU or CPU, driver and torch; '' where that is not known."""
    return ", ".join(filter(None, _fields(point.environment).values())) if point.environment is not None else ""


def several_environments(points: Sequence[Point]) -> str:
    """Says that points of one table differ in what they were measured with, as a run resumed elsewhere; '' where they do not."""
    places = [point.environment for point in points if point.environment is not None]
    kinds = {tuple(_fields(there).values()): there for there in places}
    if not any(differing(a, b) for a, b in combinations(kinds.values(), 2)):
        return ""
    apart = [len(set(values)) > 1 for values in zip(*kinds, strict=True)]  # what is the same in all is not named
    found = Counter(", ".join(filter(None, compress(_fields(there).values(), apart))) for there in places)
    named = [f"{name} ({n} {'point' if n == 1 else 'points'})" for name, n in found.most_common(_MOST_NAMED)]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"points were measured with {len(found)} environments: {'; '.join(named)}{more}; only those of one compare exactly"


def different_environments(pairs: Sequence[tuple[Point, Point]]) -> str:
    """Says that A and B differ in what they were measured with, and how often; '' where they do not."""
    both = [differing(a.environment, b.environment) for a, b in pairs if a.environment and b.environment]
    apart = [found for found in both if found is not None]
    if not apart:
        return ""
    which = "" if len(pairs) == 1 else f" of {len(apart)} of {len(pairs)} pairs"
    return f"A and B{which} were measured with different environments: A {apart[0][0]}; B {apart[0][1]}"


def _described(points: Sequence[Point]) -> str:
    """Of one host: how many points, and on what."""
    gpu = points[0].environment.gpu if points[0].environment is not None else None
    words = [f"{len(points)} {'point' if len(points) == 1 else 'points'}"]
    words += [f"{gpu.name}, driver {gpu.driver}" if gpu.driver else gpu.name] if gpu is not None else []
    return ", ".join(words)
