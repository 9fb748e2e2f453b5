"""What is tried first: most of the gain in one measurement, as levers are cheap to put on and dear to measure.

Of a step that nobody here wrote the first attempt has all that is usually kept. A lever that is refused by name is left out
and the rest tried again; where the rest is wrong, slower or fails for no known reason, weights stay in fp32; then what plain
PyTorch offers is tried, and then lever by lever. Of flopwise's own models it has what is predicted to be fastest together.
"""

import math
from collections.abc import Callable, Sequence

from flopwise.advice.constants import WORTH_TRYING
from flopwise.advice.moves import Move, with_levers
from flopwise.advice.ranking import MoveRanking
from flopwise.predict.plain_levers import PLAIN
from flopwise.records.tuning import Attempt
from flopwise.spec.recipe import OWN_OPTIMIZERS
from flopwise.spec.workload import UserStep, Workload

BEST = {
    "precision": "bf16-master",
    "optimizer": "flopwise",
    "attention": "sdpa",
    "loss": "fused",
    "compile": "blocks",
    "graph": "on",
    "overlap": "on",
}
SAFER = BEST | {"precision": "bf16"}  # weights stay in fp32
# In the place of a value that was refused.
INSTEAD = {("precision", "bf16-master"): "bf16", ("optimizer", "flopwise"): "fused", ("compile", "blocks"): "default"}
FEWEST = 2  # levers: one is no bundle
# In this order levers of our own models are chosen, twice. A compiler takes longer than all others together, and is tried alone.
CHOSEN = ("precision", "attention", "optimizer", "loss", "norm", "activation", "rope", "projections", "overlap")

Refused = frozenset[tuple[str, str]]  # levers with their values


def next_bundle(
    current: Workload, attempts: Sequence[Attempt], refused: Refused, *, keep_exact: bool = False
) -> Move | None:
    """The bundle to try now; None: it is over with them."""
    before = [attempt for attempt in attempts if len(attempt.levers) > FEWEST]
    if not isinstance(current.subject, UserStep) or any(attempt.kept for attempt in before):
        return None
    tried = {attempt.name for attempt in before}
    unexplained = [one for one in before if not refused & set(one.levers.items())]
    for wanted in (BEST, SAFER, PLAIN)[len(unexplained) :]:
        levers = left_to_change(current, wanted, refused, keep_exact)
        move = _bundle(current, levers) if len(levers) >= FEWEST else None
        if move is not None and move.name not in tried:
            return move
    return None


def left_to_change(current: Workload, wanted: dict[str, str], refused: Refused, keep_exact: bool) -> dict[str, str]:
    """The levers of a bundle that change something here and were not refused.

    >>> from flopwise.spec.workload import workload
    >>> left_to_change(workload("py:a:b", graph="on"), PLAIN, frozenset({("compile", "default")}), keep_exact=False)
    {'precision': 'bf16', 'optimizer': 'fused'}
    """
    levers = {name: _allowed(name, value, refused) for name, value in wanted.items()}
    recipe, written = current.recipe, current.subject.written if isinstance(current.subject, UserStep) else None
    if levers["optimizer"] not in OWN_OPTIMIZERS:  # which alone keeps masters and can be split
        levers |= {"overlap": "", "precision": _allowed("precision", "bf16", refused)}
    without = {"attention"} if recipe.attention != "naive" else set[str]()
    if keep_exact or recipe.precision in ("fp16", "bf16-pure"):
        without.add("precision")
    if written is not None and written.compile != "off":  # its graphs hold the head and all weights
        without |= {"compile", "loss", "overlap"}
    left = {name: value for name, value in levers.items() if value and name not in without}
    return {name: value for name, value in left.items() if getattr(recipe, name) != value}


def _allowed(lever: str, value: str, refused: Refused) -> str:
    while value and (lever, value) in refused:
        value = INSTEAD.get((lever, value), "")
    return value


def predicted_bundle(
    start: Workload,
    attempts: Sequence[Attempt],
    ranking: MoveRanking,
    from_here: Callable[[Workload, Sequence[str]], list[Move]],
    room_bytes: float,
    allow: Sequence[str],
) -> Move | None:
    """Of our own model: what is predicted to be fastest; where that failed, without what is tried on request only."""
    if ranking.start is None or any(attempt.kept for attempt in attempts):
        return None
    step_ns = ranking.start.now.wall_ns * ranking.start.scale

    def saving_ns(move: Move) -> float | None:
        return ranking.rough_ns(move) if (ranking.peak_bytes(move) or 0) < room_bytes else None

    for allowed in dict.fromkeys((tuple(allow), ())):
        move = fastest_together(start, lambda work: from_here(work, allowed), saving_ns, step_ns)  # noqa: B023  called here
        if move is not None and move.name not in {attempt.name for attempt in attempts}:
            return move
    return None


def fastest_together(
    start: Workload,
    from_here: Callable[[Workload], list[Move]],
    saving_ns: Callable[[Move], float | None],
    step_ns: float,
) -> Move | None:
    """The levers that are predicted to save most together, each at its best value beside those before it.

    `from_here` gives the moves from a step, `saving_ns` what one saves of the start's `step_ns`. A CUDA graph is one of them
    unless it is predicted to cost time: what the host takes is the least sure of all predictions. None: no two save together.
    """

    graph = {move.lever: move.value for move in from_here(start) if move.lever == "graph"}
    levers = graph if _saved(start, graph, saving_ns) > -math.inf else {}
    best_ns = _saved(start, levers, saving_ns)
    for lever in 2 * CHOSEN:
        for one in (move.levers for move in from_here(with_levers(start, levers) or start) if move.lever == lever):
            if (ns := _saved(start, levers | one, saving_ns)) > best_ns + WORTH_TRYING * (step_ns - best_ns):
                levers, best_ns = levers | one, ns
    without = {name: value for name, value in levers.items() if name != "graph"}
    costs = _saved(start, without, saving_ns) > best_ns
    best = _bundle(start, without if costs else without | levers)
    return best if best is not None and len(best.levers) >= FEWEST else None


def worth_of_each(move: Move, start: Workload, ranking: MoveRanking) -> dict[str, float]:
    """By lever of a bundle, by how much the step is predicted to be longer without it alone; not of one that others need."""
    if not move.also or ranking.change(move) is None:
        return {}
    whole_ns = _saved(start, move.levers, ranking.rough_ns)
    rests = {one: {name: value for name, value in move.levers.items() if name != one} for one in move.levers}
    worth = {one: whole_ns - _saved(start, rest, ranking.rough_ns) for one, rest in rests.items()}
    return {one: ns for one, ns in worth.items() if math.isfinite(ns)}


def _saved(start: Workload, levers: dict[str, str], saving_ns: Callable[[Move], float | None]) -> float:
    """-inf where they do not go together, or nothing is known of it."""
    move = _bundle(start, levers)
    ns = saving_ns(move) if move is not None else None if levers else 0.0
    return -math.inf if ns is None else ns


def _bundle(start: Workload, levers: dict[str, str]) -> Move | None:
    """None where they do not go together."""
    levers = {name: value for name, value in levers.items() if str(getattr(start.recipe, name)) != value}
    changed = with_levers(start, levers) if levers else None
    if changed is None:
        return None
    (lever, value), *rest = levers.items()
    return Move(lever=lever, value=value, workload=changed, also=dict(rest))
