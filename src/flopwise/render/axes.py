"""What differs between the points of a sweep, and what each is called by it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flopwise.records.run import Point
from flopwise.render.visible import visible
from flopwise.spec.operations import OpSpec
from flopwise.spec.recipe import LEVERS
from flopwise.spec.workload import takes

LONGEST_NAME, LONGEST_TOOLTIP = 60, 200  # characters of a point's name at an axis, and in a tooltip
_MOST_RELATIVE = 30  # points that are named by their difference from another; with more, nobody looks the other up
MESSAGE = "bytes"  # of a collective, in decimal units as links are
_HIDDEN = ("device", "warmup", "samples", "implementation")  # of what all points share


@dataclass(frozen=True)
class Axes:
    """`varying[i]` holds point i's own values under `names`; `fixed` holds what all points share and did not default to."""

    names: tuple[str, ...]
    varying: tuple[Mapping[str, Any], ...]
    fixed: Mapping[str, Any]


def axes_of(points: Sequence[Point]) -> Axes:
    """Split the points' settings."""
    settings = [_settings(point) for point in points]
    names = dict.fromkeys(name for one in settings for name in one)
    differing = tuple(name for name in names if len({one.get(name) for one in settings}) > 1)
    hidden = {*differing, *_default_levers(points), *_HIDDEN}
    shared = settings[0].items() if settings else ()
    fixed = {name: value for name, value in shared if name not in hidden and value != ""}
    return Axes(differing, tuple({name: one.get(name) for name in differing} for one in settings), fixed)


def _default_levers(points: Sequence[Point]) -> set[str]:
    """Levers that not all points change."""
    changed = [recipe.changed() for recipe in {point.trial.workload.recipe for point in points}]
    return {lever for lever in LEVERS if not all(lever in one for one in changed)}


def _settings(point: Point) -> dict[str, Any]:
    w, sampling = point.trial.workload, point.trial.sampling
    own: dict[str, Any] = w.changes
    if isinstance(w.subject, OpSpec):
        own = {"impl": w.subject.impl} | w.subject.dims
        own |= {"causal": "on" if w.subject.causal else "off"} if w.subject.name == "attention" else {}
    sizes = {name: getattr(w, name) for name in takes(w.subject)}
    return (
        {"workload": w.target}
        | own
        | sizes
        | msgspec.structs.asdict(w.recipe)
        | {
            "implementation": w.implementation,
            "warmup": "steady" if sampling.warmup is None else sampling.warmup,
            "samples": sampling.samples,
            "device": point.environment.gpu.name if point.environment and point.environment.gpu else point.trial.device,
        }
    )


def labels_of(points: Sequence[Point], axes: Axes | None = None) -> list[str]:
    """A name for each point by what differs; no two are the same, or a chart would draw them as one."""
    varying = (axes or axes_of(points)).varying
    whole = [settings_text(v) or point.trial.workload.label() for point, v in zip(points, varying, strict=True)]
    if len(points) <= _MOST_RELATIVE and any(len(label) > LONGEST_NAME for label in whole):
        return [visible(label, LONGEST_NAME) for label in _relative(whole, varying)]
    labels: list[str] = []
    taken: Counter[str] = Counter()  # a label, and each beginning of one that a number follows
    for one in whole:
        label = visible(one, LONGEST_TOOLTIP)
        labels.append(f"{label} #{taken[label] + 1}" if taken[label] else label)
        words = labels[-1].split(" #")
        taken.update(" #".join(words[:n]) for n in range(1, len(words) + 1))
    return labels


def settings_text(settings: Mapping[str, Any]) -> str:
    """`small context=512 graph=on`."""
    return " ".join(f"{name}={value}" if name != "workload" else str(value) for name, value in settings.items())


def _relative(whole: Sequence[str], varying: Sequence[Mapping[str, Any]]) -> list[str]:
    """Points that differ in much, each by its difference from the most similar one before it.

    >>> _relative(["a=1 b=1", "a=1 b=2", "a=2 b=2"], [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}])
    ['1. a=1 b=1', '2. as 1 with b=2', '3. as 2 with a=2']
    """
    labels = [f"1. {whole[0]}"]
    for place, now in enumerate(varying[1:], 1):
        changes = [{n: v for n, v in now.items() if other.get(n) != v} for other in varying[:place]]
        like = min(range(place), key=lambda i: (len(changes[i]), i))
        change = f"with {settings_text(changes[like])}" if changes[like] else "again"
        labels.append(f"{place + 1}. as {like + 1} {change}")
    return labels
