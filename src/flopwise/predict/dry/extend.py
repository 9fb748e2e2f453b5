"""A deep model's tape from a shallow one's: the blocks of a Transformer do the same, so one stands for many.

A unit is what repeats: a block, or a checkpointed segment of blocks. The shallow model has five units; the middle one is
repeated. Nothing is scaled or fitted: events are copied, with the storages they name moved to the unit they are in, and
the result is the tape that the deep model itself would have written. Where the three units in the middle are not alike,
`NotPeriodic` is raised, and the deep model must run.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, replace

import msgspec

from flopwise.capture.watch.tape import ALLOC, FREE, OP, Event, ManyTensors, Op, Section, Tape
from flopwise.work.catalogue import launches_over

UNITS, MIDDLE = 5, 2
_BLOCK = re.compile(r"^blocks\.(\d+)")

Key = tuple[int, int | None, int]  # of a storage: section, unit, how many-th of these


class NotPeriodic(Exception):
    """The blocks of this model do not repeat each other."""


def shallow_depth(layers: int, checkpoint: int) -> int | None:
    """The depth of the model to run instead, or None where the deep one is not deep enough to be worth it.

    >>> shallow_depth(32, 0), shallow_depth(6, 0), shallow_depth(32, 3)
    (5, None, 14)
    """
    per_unit = checkpoint or 1
    units = -(-layers // per_unit)
    return None if units <= UNITS + 1 else layers - (units - UNITS) * per_unit


def extend(shallow: Tape, build: Tape, extra_units: int, blocks_per_unit: int) -> Tape:
    """The tape of a model with so many more units. `build`: the deep model's own building, which needs no extending."""
    return _Extension(shallow, build, extra_units, blocks_per_unit).tape()


@dataclass(slots=True)
class _Run:
    """Neighbouring events of one unit."""

    unit: int | None
    events: list[Event]


class _Extension:
    def __init__(self, shallow: Tape, build: Tape, extra: int, per_unit: int) -> None:
        self.old, self.extra, self.per_unit = shallow, extra, per_unit
        self.new = Tape(storages=list(build.storages), ops=list(build.ops), build=build.build)
        self.keys: dict[int, Key] = {}  # storages of the shallow tape
        self.numbers: dict[Key, int] = {}  # storages of the deep tape
        self.ops: dict[tuple[int, int | None], int] = {}  # (op of the shallow tape, unit it now is in) -> op
        self.counts: dict[tuple[int, int | None], int] = defaultdict(int)
        self.built = {n for kind, n in shallow.build.events if kind == ALLOC}

    def tape(self) -> Tape:
        sections = [*self.old.first, *self.old.steady]
        runs = [self._runs(at, section) for at, section in enumerate(sections)]
        self._check_alike(sections)
        made = [self._section(section.name, each) for section, each in zip(sections, runs, strict=True)]
        self.new.first, self.new.steady = made[: len(self.old.first)], made[len(self.old.first) :]
        return self.new

    # Which unit an event belongs to.

    def _unit(self, module: str) -> int | None:
        found = _BLOCK.match(module)
        return int(found.group(1)) // self.per_unit if found else None

    def _runs(self, at: int, section: Section) -> list[_Run]:
        places = self._places(section)
        runs: list[_Run] = []
        for (kind, number), place in zip(section.events, places, strict=True):
            unit = place
            if kind == ALLOC:
                if place is None and self.old.storages[number].module:
                    unit = self._unit(self.old.storages[number].module)  # one of the many that an op makes
                self.keys[number] = (at, unit, self.counts[at, unit])
                self.counts[at, unit] += 1
            elif kind == FREE and place is None and number in self.keys:
                unit = self.keys[number][1]
            if not runs or runs[-1].unit != unit:
                runs.append(_Run(unit, []))
            runs[-1].events.append((kind, number))
        return runs

    def _places(self, section: Section) -> list[int | None]:
        """Of every event the unit whose turn it is. What lies between two units belongs to the one before."""
        of_op = [self._unit(self.old.ops[n].work.module) if kind == OP else None for kind, n in section.events]
        last = max((i for i, unit in enumerate(of_op) if unit is not None), default=-1)
        places: list[int | None] = []
        now: int | None = None
        for i, (kind, number) in enumerate(section.events):
            if kind in (OP, ALLOC):
                op = number if kind == OP else self.old.storages[number].op
                unit = self._unit(self.old.ops[op].work.module)
                now = unit if unit is not None or i > last else now
            places.append(now)
        return places

    def _check_alike(self, sections: list[Section]) -> None:
        for at in range(len(sections)):
            made: dict[int, list[tuple[int, tuple[int, ...], str]]] = defaultdict(list)
            for number, (section, unit, _) in self.keys.items():
                if section == at and unit in (MIDDLE - 1, MIDDLE, MIDDLE + 1):
                    storage = self.old.storages[number]
                    made[unit].append((storage.nbytes, storage.shape, self.old.ops[storage.op].work.op))
            if not made[MIDDLE - 1] == made[MIDDLE] == made[MIDDLE + 1]:
                raise NotPeriodic

    # The deep tape.

    def _section(self, name: str, runs: list[_Run]) -> Section:
        made = Section(name)
        for i, run in enumerate(runs):
            if run.unit != MIDDLE:
                self._copy(run, self._shifted(run.unit), made)
                continue
            before = runs[i - 1].unit if i else None
            after = runs[i + 1].unit if i + 1 < len(runs) else None
            units = range(MIDDLE, MIDDLE + self.extra + 1)
            if before == MIDDLE - 1 or after == MIDDLE + 1:
                ordered = list(units)
            elif before == MIDDLE + 1 or after == MIDDLE - 1:
                ordered = list(reversed(units))
            else:
                raise NotPeriodic
            for unit in ordered:
                self._copy(run, unit, made)
        return made

    def _shifted(self, unit: int | None) -> int | None:
        return unit if unit is None or unit <= MIDDLE else unit + self.extra

    def _copy(self, run: _Run, unit: int | None, made: Section) -> None:
        moved = 0 if run.unit is None or unit is None else unit - run.unit
        for kind, number in run.events:
            if kind == OP:
                made.events.append((OP, self._op(number, moved)))
            elif kind == ALLOC:
                made.events.append((ALLOC, self._allocate(number, moved)))
            else:
                made.events.append((FREE, self._named(number, run.unit, moved)))

    def _allocate(self, number: int, moved: int) -> int:
        section, unit, ordinal = self.keys[number]
        storage = self.old.storages[number]
        outer = self._unit(self.old.ops[storage.op].work.module) is None
        copy = replace(
            storage, op=self._op(storage.op, 0 if outer else moved), module=self._renamed(storage.module, moved)
        )
        self.new.storages.append(copy)
        self.numbers[section, None if unit is None else unit + moved, ordinal] = len(self.new.storages) - 1
        return len(self.new.storages) - 1

    def _named(self, number: int, here: int | None, moved: int) -> int:
        """The storage that stands where this one stood: in the neighbouring unit still, or at its own end of the model."""
        if number in self.built:
            raise NotPeriodic
        section, unit, ordinal = self.keys[number]
        if unit is not None:
            near = here is not None and abs(unit - here) <= 1
            if not near and unit == MIDDLE:
                raise NotPeriodic
            unit = unit + moved if near else self._shifted(unit)
        return self.numbers[section, unit, ordinal]

    def _op(self, number: int, moved: int) -> int:
        unit = self._unit(self.old.ops[number].work.module)
        if (number, moved) not in self.ops:
            op = self.old.ops[number]
            work = msgspec.structs.replace(
                op.work, module=self._renamed(op.work.module, moved if unit is not None else 0)
            )
            self.new.ops.append(self._many(Op(work, op.tensors, op.lists)) if op.tensors else Op(work))
            self.ops[number, moved] = len(self.new.ops) - 1
        return self.ops[number, moved]

    def _renamed(self, module: str, moved: int) -> str:
        found = _BLOCK.match(module)
        if found is None or not moved:
            return module
        return f"blocks.{int(found.group(1)) + moved * self.per_unit}{module[found.end() :]}"

    def _many(self, op: Op) -> Op:
        """An op over the tensors of all units: the middle unit's are there so many times more."""
        tensors: list[ManyTensors] = []
        middle = [t for t in op.tensors if self._unit(t.module) == MIDDLE]
        repeated = False
        for each in op.tensors:
            unit = self._unit(each.module)
            if unit == MIDDLE:
                if not repeated:
                    for moved in range(self.extra + 1):
                        tensors += [replace(t, module=self._renamed(t.module, moved)) for t in middle]
                repeated = True
                continue
            moved = self.extra if unit is not None and unit > MIDDLE else 0
            tensors.append(replace(each, module=self._renamed(each.module, moved)))
        work = msgspec.structs.replace(
            op.work,
            read_bytes=op.work.read_bytes + self.extra * sum(t.read_bytes for t in middle),
            write_bytes=op.work.write_bytes + self.extra * sum(t.write_bytes for t in middle),
            kernels=launches_over(op.work.op, [t.elements for t in tensors], op.lists),
        )
        return Op(work, tuple(tensors), op.lists)
