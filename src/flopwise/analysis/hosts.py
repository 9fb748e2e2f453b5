"""Which of a cluster's nodes points were measured on: times of two machines are no comparison of two workloads."""

from collections.abc import Sequence

from flopwise.records.run import Point

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


def _described(points: Sequence[Point]) -> str:
    """Of one host: how many points, and on what."""
    gpu = points[0].environment.gpu if points[0].environment is not None else None
    words = [f"{len(points)} {'point' if len(points) == 1 else 'points'}"]
    words += [f"{gpu.name}, driver {gpu.driver}" if gpu.driver else gpu.name] if gpu is not None else []
    return ", ".join(words)
