"""What differs between the points of a sweep, and what they share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flopwise.records.run import Point
from flopwise.spec.recipe import LEVERS
from flopwise.spec.workload import OpSpec, takes


@dataclass(frozen=True)
class Axes:
    """`varying[i]` holds point i's own values under `names`; `fixed` holds what all points share and did not default to."""

    names: tuple[str, ...]
    varying: tuple[Mapping[str, Any], ...]
    fixed: Mapping[str, Any]


def axes_of(points: Sequence[Point]) -> Axes:
    """Split the points' settings."""
    settings = [_settings(point) for point in points]
    names = tuple(dict.fromkeys(name for s in settings for name in s))
    differing = tuple(n for n in names if len({s.get(n) for s in settings}) > 1)
    usual = {name for point in points for name in LEVERS if name not in point.trial.workload.recipe.changed()}
    hidden = usual | {"device", "warmup", "samples", "implementation"}
    shared = [n for n in names if n not in differing and n not in hidden and settings[0][n] != ""]
    fixed = {n: settings[0][n] for n in shared}
    return Axes(names=differing, varying=tuple({n: s.get(n) for n in differing} for s in settings), fixed=fixed)


def _settings(point: Point) -> dict[str, Any]:
    w, sampling = point.trial.workload, point.trial.sampling
    settings: dict[str, Any] = {"workload": w.target}
    settings |= ({"impl": w.subject.impl} | w.subject.dims) if isinstance(w.subject, OpSpec) else w.changes
    settings |= {name: getattr(w, name) for name in takes(w.subject)} | {
        lever: getattr(w.recipe, lever) for lever in LEVERS
    }
    warmup = "steady" if sampling.warmup is None else sampling.warmup
    device = point.environment.gpu.name if point.environment and point.environment.gpu else point.trial.device
    return settings | {
        "implementation": w.implementation,
        "warmup": warmup,
        "samples": sampling.samples,
        "device": device,
    }
