"""Plays a tape through an allocator: what is allocated when, for whom, and where the peak is."""

from collections import Counter
from dataclasses import dataclass

from flopwise.capture.watch.tape import ALLOC, FREE, HOST, OP, Event, Section, Tape
from flopwise.records.run import PhaseMemory
from flopwise.work.allocator import Block, CachingAllocator
from flopwise.work.operation import Footprint

REPEATS = 4  # steady steps before the one that is reported: the allocator's blocks have then settled


class PlainAllocator:
    """Counts the bytes asked for: what the CPU's allocator does."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0

    def allocate(self, nbytes: int) -> Block:
        self.allocated_bytes += nbytes
        self.reserved_bytes = max(self.reserved_bytes, self.allocated_bytes)
        return Block(0, nbytes, False)

    def free(self, block: Block | None) -> None:
        self.allocated_bytes -= _size(block)


@dataclass
class Played:
    """One steady step, with the allocator's figures."""

    ops: list[int]  # numbers of the ops, in order
    live: list[dict[str, int]]  # of each op: bytes by owner while it ran
    peak: Footprint
    peak_op: int  # position in `ops`
    at_peak: set[int]  # storages
    after_forward: set[int]  # those that backward finds; none where there is no backward
    moments: list[Footprint]
    memory: list[PhaseMemory]


class Player:
    """The state of the memory while a tape plays."""

    def __init__(self, tape: Tape, owners: list[str], allocator: CachingAllocator | PlainAllocator) -> None:
        self.tape, self.owners, self.allocator = tape, owners, allocator
        self.blocks: dict[int, Block | None] = {}
        self.live: Counter[str] = Counter()

    def event(self, kind: int, number: int) -> None:
        if self.owners[number] == HOST:
            return
        if kind == ALLOC:
            block = self.allocator.allocate(self.tape.storages[number].nbytes)
            self.blocks[number] = block
            self.live[self.owners[number]] += _size(block)
        elif number in self.blocks:
            block = self.blocks.pop(number)
            self.live[self.owners[number]] -= _size(block)
            self.allocator.free(block)

    def play(self, sections: list[Section]) -> None:
        for section in sections:
            for kind, number in section.events:
                if kind != OP:
                    self.event(kind, number)

    def footprint(self, moment: str, phase: str) -> Footprint:
        return Footprint(moment=moment, phase=phase, owners=self.owner_bytes())

    def owner_bytes(self) -> dict[str, int]:
        return {owner: nbytes for owner, nbytes in self.live.items() if nbytes}


def _size(block: Block | None) -> int:
    return block.size if block is not None else 0


def play(tape: Tape, owners: list[str], allocator: CachingAllocator | PlainAllocator, repeats: int = REPEATS) -> Played:
    """Play the building, the first step, steady steps until the blocks have settled, and report one more."""
    player = Player(tape, owners, allocator)
    player.play([tape.build])
    player.play(tape.first)
    carried = _carried_over(tape)
    if carried is not None:
        for _ in range(repeats):
            player.play(tape.steady)
            for before, after in carried:  # what this step leaves behind is what the next one finds
                player.blocks[before] = player.blocks.pop(after)
    return _report_step(player)


def _carried_over(tape: Tape) -> list[tuple[int, int]] | None:
    """Pairs of storages: left behind by the first step and freed in the steady one; left behind by the steady one.

    They correspond in the order of their birth. None: they do not match, so a steady step cannot be played again.
    """
    born_first = {n for s in tape.first for kind, n in s.events if kind == ALLOC}
    born_steady = {n for s in tape.steady for kind, n in s.events if kind == ALLOC}
    freed = {n for s in tape.steady for kind, n in s.events if kind == FREE}
    before, after = sorted(born_first & freed), sorted(born_steady - freed)
    if [tape.storages[n].nbytes for n in before] != [tape.storages[n].nbytes for n in after]:
        return None
    return list(zip(before, after, strict=True))


def _report_step(player: Player) -> Played:
    """Play one more steady step."""
    tape, allocator = player.tape, player.allocator
    played = Played(
        [], [], player.footprint("peak", ""), 0, set(), set(), [player.footprint("start of forward", "")], []
    )
    boundaries = _boundaries(tape)
    there, peak_bytes, peak_at, at = set(player.blocks), allocator.allocated_bytes, 0, 0
    for section in tape.steady:
        start = phase_peak = allocator.allocated_bytes
        for kind, number in section.events:
            if at in boundaries:
                played.moments.append(player.footprint(boundaries[at], section.name))
            at += 1
            if kind != OP:
                player.event(kind, number)
                phase_peak = max(phase_peak, allocator.allocated_bytes)
                if kind == ALLOC and allocator.allocated_bytes > peak_bytes:
                    peak_bytes, peak_at = allocator.allocated_bytes, at
                    played.peak, played.peak_op = player.footprint("peak", section.name), len(played.ops)
                continue
            played.ops.append(number)
            played.live.append(player.owner_bytes())
        played.memory.append(
            PhaseMemory(
                phase=section.name,
                start_bytes=start,
                peak_bytes=phase_peak,
                end_bytes=allocator.allocated_bytes,
                reserved_bytes=allocator.reserved_bytes,
            )
        )
    events = _steady_events(tape)
    played.at_peak = {n for n in _alive(set(there), events[:peak_at]) if player.owners[n] != HOST}
    for position, moment in boundaries.items():
        if moment == "after forward":
            played.after_forward = _alive(set(there), events[:position])
    played.moments.append(_last_moment(player, {tape.ops[n].work.phase for n in played.ops}))
    return played


def _steady_events(tape: Tape) -> list[Event]:
    return [event for section in tape.steady for event in section.events]


def _alive(there: set[int], events: list[Event]) -> set[int]:
    """What is there after the events."""
    for kind, number in events:
        if kind == ALLOC:
            there.add(number)
        elif kind == FREE:
            there.discard(number)
    return there


def _last_moment(player: Player, phases: set[str]) -> Footprint:
    for phase, moment in (("optimizer", "after optimizer"), ("backward", "after backward")):
        if phase in phases:
            return player.footprint(moment, phase)
    return player.footprint("after forward", "forward")


def _boundaries(tape: Tape) -> dict[int, str]:
    """Positions among the steady step's events where forward ends and where backward ends, if something follows them."""
    events = _steady_events(tape)
    phases = [(at, tape.ops[n].work.phase) for at, (kind, n) in enumerate(events) if kind == OP]
    backward = [at for at, phase in phases if phase in ("backward", "recompute")]
    found = {}
    if backward:
        found[_begins(tape, events, backward[0])] = "after forward"
        later = [at for at, phase in phases if at > backward[-1] and phase == "optimizer"]
        if later:
            found[_begins(tape, events, later[0])] = "after backward"
    return found


def _begins(tape: Tape, events: list[Event], at: int) -> int:
    """The position of the op's first event: its results come before it."""
    number = events[at][1]
    while at > 0 and events[at - 1][0] == ALLOC and tape.storages[events[at - 1][1]].op == number:
        at -= 1
    return at
