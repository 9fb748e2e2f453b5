"""A sweep file: lists expand to the product; named groups; exclusions.

name = "end-to-end"

[base]                       # holds for every group
batch = 4

[group.forward]              # a named group
workload = ["small", "medium"]
precision = ["fp32", "bf16"]
exclude = [{ workload = "medium", precision = "fp32" }]
"""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields
from flopwise.spec.model import ModelSpec
from flopwise.spec.operations import OPS, OpSpec
from flopwise.spec.recipe import LEVERS, read_toml
from flopwise.spec.user_step import is_user_step
from flopwise.spec.workload import Sampling, Trial, UserStep, workload

_SHAPE = ("batch", "context", "phase", "implementation")
_OPTIONS = (*_SHAPE, "impl")
_SAMPLING = Sampling.__struct_fields__
_SETTABLE = tuple(f for f in ModelSpec.__struct_fields__ if f != "name") + tuple(
    d for o in OPS.values() for d in (*o.dims, "causal")
)
AXES = ("workload", "device", "trace", *_OPTIONS, *LEVERS, *_SAMPLING, *dict.fromkeys(_SETTABLE))
MAX_POINTS = 10_000


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep, expanded: every trial once, in the file's order."""

    name: str
    trials: tuple[Trial, ...]


def read_sweep(path: str | Path, overrides: dict[str, Any] | None = None) -> Sweep:
    """Read a sweep file. `overrides` (say, `device`) hold for every point."""
    table = read_toml(path, "a sweep file")
    try:
        return sweep_from(table, name=Path(path).stem, overrides=overrides or {})
    except FlopwiseError as error:
        raise FlopwiseError(f"{path}: {error.message}", error.hint) from None


def sweep_from(table: dict[str, Any], name: str = "sweep", overrides: dict[str, Any] | None = None) -> Sweep:
    """A sweep from a table as TOML gives it.

    >>> len(sweep_from({"base": {"workload": "tiny"}, "group": {"g": {"batch": [1, 2], "precision": ["fp32", "bf16"]}}}).trials)
    4
    """
    fields.known("the sweep", table, ("name", "base", "group", "exclude"))
    base = _table("base", table.get("base", {}))
    groups = _table("group", table.get("group", {"": {}}))
    tables = {group: _table(f"group.{group}", axes) for group, axes in groups.items()}
    known = (*AXES, *_arguments(base, tables.values()))
    excluded = _exclusions(table.get("exclude", []), known)
    trials: dict[str, Trial] = {}
    total = 0
    for group, own in tables.items():
        rules = excluded + _exclusions(own.pop("exclude", []), known)
        rows = _expand(base | own | (overrides or {}), group)
        total += len(rows)
        if total > MAX_POINTS:
            raise FlopwiseError(f"the sweep expands to {total} points or more", f"allowed: up to {MAX_POINTS}")
        for row in rows:
            if any(_matches(row, rule) for rule in rules):
                continue  # before it is built: a rule may leave out what could not be
            trial = _trial(row, group)
            if not any(_matches(_settings(trial) | row, rule) for rule in rules):
                trials.setdefault(trial.key(), trial)
    if not trials:
        raise FlopwiseError("the sweep has no points", "every point is excluded, or a list is empty")
    name = table.get("name", name)
    fields.text("name", name)
    return Sweep(name=name, trials=tuple(trials.values()))


def _expand(axes: dict[str, Any], group: str) -> list[dict[str, Any]]:
    known = (*AXES, *axes) if _has_user_steps(axes) else AXES  # a factory knows its own arguments
    fields.known(f"group {fields.show(group)}" if group else "the sweep", axes, known)
    if "workload" not in axes:
        raise FlopwiseError(
            f"group {fields.show(group)} names no workload", 'for example workload = ["small", "medium"]'
        )
    lists = [v if isinstance(v, list) else [v] for v in axes.values()]
    total = math.prod(len(values) for values in lists)
    if total > MAX_POINTS:
        raise FlopwiseError(f"group {fields.show(group)} expands to {total} points", f"allowed: up to {MAX_POINTS}")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*lists)]


def _has_user_steps(axes: dict[str, Any]) -> bool:
    named = axes.get("workload")
    return any(isinstance(one, str) and is_user_step(one) for one in (named if isinstance(named, list) else [named]))


def _arguments(base: dict[str, Any], groups: Iterable[dict[str, Any]]) -> list[str]:
    """The names that groups with steps of the user's own set, in addition to the axes that all have."""
    return [name for own in groups if _has_user_steps(base | own) for name in base | own]


def _matches(row: dict[str, Any], rule: dict[str, Any]) -> bool:
    """Whether a point is what a rule describes; a list in a rule means any of its values."""
    return all(row.get(k) in (v if isinstance(v, list) else [v]) for k, v in rule.items())


def _trial(row: dict[str, Any], group: str) -> Trial:
    if not isinstance(row["workload"], str):
        raise FlopwiseError(f"workload = {fields.show(row['workload'])} is not allowed", "allowed: a name in quotes")
    own = is_user_step(row["workload"])  # all that is no axis of every workload is the factory's, a batch size too
    shape = ("implementation",) if own else _OPTIONS
    options = {k: v for k, v in row.items() if k in shape or k in LEVERS}
    sampling = {k: v for k, v in row.items() if k in _SAMPLING}
    changes = {k: v for k, v in row.items() if k not in (*options, *sampling, "workload", "device", "trace")}
    return Trial(
        workload=workload(row["workload"], set=changes, **options),
        sampling=Sampling(**sampling),
        device=row.get("device", "auto"),
        group=group,
        trace="" if row.get("trace", "off") == "off" else row["trace"],
    )


def _settings(trial: Trial) -> dict[str, Any]:
    """Every axis of a trial with its value, the defaults too."""
    w = trial.workload
    shape: dict[str, Any] = {}
    if isinstance(w.subject, OpSpec):
        shape = w.subject.dims | {"impl": w.subject.impl, "causal": w.subject.causal}
    if isinstance(w.subject, ModelSpec):
        shape = msgspec.structs.asdict(w.subject)
    own = {name: getattr(w, name) for name in _SHAPE} | msgspec.structs.asdict(w.recipe)
    own |= w.subject.arguments if isinstance(w.subject, UserStep) else {}
    return (
        shape
        | own
        | msgspec.structs.asdict(trial.sampling)
        | {"workload": w.target, "device": trial.device, "trace": trial.trace or "off"}
    )


def _table(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FlopwiseError(f"{name} = {fields.show(value)} is not allowed", f"allowed: a table, [{name}]")
    return dict(value)


def _exclusions(value: object, known: Iterable[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(rule, dict) and rule for rule in value):
        raise FlopwiseError(
            f"exclude = {fields.show(value)} is not allowed", 'allowed: a list like [{ workload = "xl", batch = 8 }]'
        )
    for rule in value:
        fields.known("exclude", rule, known)
    return value
