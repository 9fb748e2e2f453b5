"""A plan: the layout of a training run, what it takes, and the next best ones. Stored by `plan -o FILE.json`."""

import math
from pathlib import Path
from typing import Any

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.records.planned import EXCHANGED, Planned, PlannedStep
from flopwise.records.possible import impossible, too_large
from flopwise.records.printed import Printed
from flopwise.spec import fields
from flopwise.spec.planned_model import PlannedModel

SCHEMA = "flopwise.plan/1"
MOST_BYTES = 16 * 2**20
_DAY_S, _HOUR_S = 86_400, 3600
_MOST_S = 1e12  # of a part of a step
_MOST_MFU = 8.0  # of the peak in half precision: fp4 has several times that


class Plan(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What a training run takes on a cluster: everything is predicted."""

    model: str
    parameters: int
    active_parameters: int
    cluster: str
    cluster_title: str
    gpu: str  # its title
    gpus: int
    host: int  # GPUs of one host
    batch: int  # sequences of a step
    context: int
    limit_bytes: int
    best: Planned
    others: tuple[Planned, ...]  # the next best that fit; then simpler ones that do not
    fitting: int  # layouts that fit
    tried: int
    tokens: float | None = None  # of the whole run
    price: float | None = None  # of a GPU for an hour, in dollars
    mfu_given: float | None = None
    rule_days: float | None = None  # by 6 · parameters · tokens at the same MFU
    notes: tuple[str, ...] = ()
    shape: PlannedModel | None = None  # of the model; files of older plans have none

    @property
    def step_s(self) -> float:
        """At the MFU that is given, else at the predicted one."""
        step = self.best.step
        return step.wall_s * step.mfu / self.mfu_given if self.mfu_given else step.wall_s

    @property
    def days(self) -> float | None:
        return self.tokens / (self.batch * self.context) * self.step_s / _DAY_S if self.tokens else None

    @property
    def gpu_hours(self) -> float | None:
        return self.days * _DAY_S / _HOUR_S * self.gpus if self.days else None

    @property
    def cost(self) -> float | None:
        return self.gpu_hours * self.price if self.gpu_hours and self.price is not None else None

    @property
    def exposed_s(self) -> float:
        """What is exchanged while nothing is computed."""
        return sum(self.best.step.parts.get(part, 0.0) for part in EXCHANGED)

    def headline(self) -> str:
        return f"{self.model} on {self.gpus:,} GPUs: a step of {units.duration(1e9 * self.step_s)}"


def read_plan(path: str | Path) -> Plan:
    """A plan from a file that `plan -o FILE.json` wrote."""
    hint = "write one with flopwise plan MODEL … -o plan.json"
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise FlopwiseError(f"{path} is too large for a plan", hint)
        found = msgspec.json.decode(text)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise FlopwiseError(f"{path} is not a plan", hint)
        return _checked(found, path)
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {error.strerror}", hint) from None
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RuntimeError) as error:
        raise FlopwiseError(f"{path} is not a plan: {error}", hint) from None


def _checked(found: dict[str, Any], path: str | Path) -> Plan:
    try:
        plan = msgspec.convert(found, Plan)
    except FlopwiseError as error:  # of its layout
        raise FlopwiseError(f"{path}: {error.message}", error.hint) from None
    if (odd := impossible(plan)) or too_large(found):
        raise FlopwiseError(f"{path}: {odd or 'a number that is too large'} is impossible", "plan again")
    for one in (plan.best, *plan.others):
        if why := _wrong(one.step):
            raise FlopwiseError(f"{path}: {why}", "plan again")
    return plan


def _wrong(step: PlannedStep) -> str:
    """What no step can be."""
    for name, seconds in {**step.parts, **step.hidden_s, "a step": step.wall_s}.items():
        if not 0 <= seconds <= _MOST_S:
            return f"{fields.show(name)} takes {fields.show(seconds)} seconds"
    if not step.wall_s:
        return "a step takes no time"
    if not 0 <= step.mfu <= _MOST_MFU:
        return f"mfu = {fields.show(step.mfu)} is not allowed"
    if not math.isclose(whole := sum(step.parts.values()), step.wall_s, rel_tol=0.01):
        return f"the parts of a step add up to {whole:.4g} of {step.wall_s:.4g} seconds"
    return ""
