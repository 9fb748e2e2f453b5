"""The dry run: a step's ops, FLOPs, bytes and live memory by owner, on fake tensors. No GPU, no memory, no weights."""

from math import prod
from typing import Any

import msgspec
import torch

from flopwise.capture.watch.owners import known_shapes, owners
from flopwise.capture.watch.tape import ALLOC, FREE, Tape
from flopwise.predict.dry.architecture import CPU, Architecture, architecture
from flopwise.predict.dry.cuda_ops import Attention
from flopwise.predict.dry.extend import NotPeriodic, extend, shallow_depth
from flopwise.predict.dry.fake_step import record, record_build
from flopwise.predict.dry.replay import PlainAllocator, play
from flopwise.records.prediction import DRY_RUN, LARGEST_TENSORS, DryRun, LiveTensor, Weight
from flopwise.spec.model import ModelSpec
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import Workload
from flopwise.work.allocator import CachingAllocator
from flopwise.work.operation import GRADIENTS, OPTIMIZER_STATE, OWNERS, PARAMETERS, SAVED, OpWork

_STAND_FOR = {"compile": "manual", "flex": "sdpa", "tiled": "flash"}  # the eager ops; what computes and saves the same

GUESSED = "numbers that the code reads from tensors (.item()) are taken as 1"


def dry_run(workload: Workload, gpu: str = "hopper") -> DryRun:
    """Run the workload's own step on fake tensors, as a GPU of this architecture (or `cpu`) would run it.

    >>> from flopwise.spec.workload import workload
    >>> run = dry_run(workload("tiny"))
    >>> run.parameters_bytes == 4 * workload("tiny").subject.parameters()
    True
    """
    chosen = architecture(gpu)
    eager, notes = _as_it_is_run(workload)
    attention = Attention(chosen, held_to="flash" if workload.recipe.attention == "flex" else "")
    tape = _extended(eager, chosen, attention) or record(eager, chosen, attention)
    owner = owners(tape, **known_shapes(workload))
    played = play(tape, owner, PlainAllocator() if chosen.name == CPU else CachingAllocator())
    return DryRun(
        source=DRY_RUN,
        workload=workload.label(),
        architecture=chosen.name,
        torch=str(torch.__version__),
        ops=tuple(_without_tensors(tape.ops[n].work, workload) for n in played.ops),
        live={
            o: tuple(live.get(o, 0) for live in played.live) for o in OWNERS if any(o in live for live in played.live)
        },
        peak=played.peak,
        peak_op=played.peak_op,
        moments=tuple(played.moments),
        phases=tuple(played.memory),
        parameters=sum(prod(tape.storages[n].shape) for n in _left(tape, owner, PARAMETERS)),
        weights=_weights(tape, owner, workload),
        largest=_tensors(tape, owner, played.at_peak)[:LARGEST_TENSORS],
        saved=tuple(t for t in _tensors(tape, owner, played.after_forward) if t.owner in SAVED and t.phase),
        parameters_bytes=sum(tape.storages[n].nbytes for n in _left(tape, owner, PARAMETERS)),
        gradients_bytes=_asked_for(tape, owner, GRADIENTS),
        optimizer_bytes=_asked_for(tape, owner, OPTIMIZER_STATE),
        attention=tuple(sorted(attention.backends)),
        notes=(*notes, *([tape.linear] if tape.linear else []), *[GUESSED] * bool(tape.guessed)),
    )


def _extended(workload: Workload, gpu: Architecture, attention: Attention) -> Tape | None:
    """The tape of flopwise's own model from that of a shallow one with the same blocks, if it is deep enough for that."""
    spec, recipe = workload.subject, workload.recipe
    if not isinstance(spec, ModelSpec) or workload.implementation != "flopwise":
        return None
    every = recipe.checkpoint if workload.trains else 0
    depth = shallow_depth(spec.n_layers, every)
    if depth is None:
        return None
    shallow = msgspec.structs.replace(workload, subject=msgspec.structs.replace(spec, n_layers=depth))
    tape = record(shallow, gpu, attention)
    per_unit = every or 1
    try:
        return extend(tape, record_build(workload, gpu), (spec.n_layers - depth) // per_unit, per_unit)
    except NotPeriodic:
        return None


def _as_it_is_run(workload: Workload) -> tuple[Workload, tuple[str, ...]]:
    """The eager workload that stands for this one, and what to say about it."""
    changes: dict[str, Any] = {}
    notes = []
    if workload.recipe.compile != "off":
        changes["compile"] = "off"
        notes.append("compile: these are the eager ops; the compiler fuses them and saves other tensors")
    if workload.recipe.graph == "on":
        changes["graph"] = "off"
        notes.append("graph: the same ops; a captured graph keeps all its memory between steps")
    if workload.recipe.attention == "flex":
        changes["attention"] = "sdpa"
        notes.append("flex: taken as flash attention, which saves and computes the same")
    if isinstance(workload.subject, OpSpec) and workload.subject.impl in _STAND_FOR:
        stands = _STAND_FOR[workload.subject.impl]
        notes.append(f"impl: {workload.subject.impl} is taken as {stands}")
        workload = msgspec.structs.replace(workload, subject=msgspec.structs.replace(workload.subject, impl=stands))
    recipe = msgspec.structs.replace(workload.recipe, **changes)
    return msgspec.structs.replace(workload, recipe=recipe), tuple(notes)


def _without_tensors(op: OpWork, workload: Workload) -> OpWork:
    """Which tensors an op reads is kept only where nothing else tells: copied blocks have the numbers of the one copied."""
    if isinstance(workload.subject, ModelSpec) and workload.implementation != "transformers":
        return msgspec.structs.replace(op, reads=(), writes=())
    return op


def _weights(tape: Tape, owner: list[str], workload: Workload) -> tuple[Weight, ...]:
    """The parameters, in the order they were made; what was replaced (by a cast, or another device's) is gone."""
    if workload.own_model is not None:
        return ()
    there = [(n, tape.storages[n]) for n in _left(tape, owner, PARAMETERS)]
    return tuple(Weight(tensor=n, shape=s.shape, dtype=s.dtype, module=s.module) for n, s in there)


def _left(tape: Tape, owner: list[str], which: str) -> list[int]:
    """The storages of this owner that are there when the steps are over."""
    freed = {n for s in tape.sections() for kind, n in s.events if kind == FREE}
    return [n for n, one in enumerate(owner) if one == which and n not in freed]


def _asked_for(tape: Tape, owner: list[str], which: str) -> int:
    """Bytes of this owner that a steady step makes, or that the steps before have left for it."""
    made = {n for s in tape.steady for kind, n in s.events if kind == ALLOC and owner[n] == which}
    return sum(tape.storages[n].nbytes for n in made or _left(tape, owner, which))


def _tensors(tape: Tape, owner: list[str], numbers: set[int]) -> tuple[LiveTensor, ...]:
    """What these storages are, largest first."""
    built = {n for kind, n in tape.build.events if kind == ALLOC}
    found = []
    for n in sorted(numbers, key=lambda n: (-tape.storages[n].nbytes, n)):
        storage, work = tape.storages[n], tape.ops[tape.storages[n].op].work
        found.append(
            LiveTensor(
                bytes=storage.nbytes,
                owner=owner[n],
                op="" if n in built else work.op,
                module=storage.module or work.module,
                phase="" if n in built else work.phase,
                shape=storage.shape,
                dtype=storage.dtype,
            )
        )
    return tuple(found)
