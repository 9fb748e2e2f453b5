"""What is tried first on a step that nobody here wrote: most of the gain in one measurement.

Levers of such a step are cheap to put on and dear to measure, as every measurement builds and compiles the model again. So the
first attempt has all that is usually kept. A lever that is refused by name is left out and the rest tried again; where the
rest is wrong, slower or fails for no known reason, weights stay in fp32; then what plain PyTorch offers is tried, and then
lever by lever.
"""

from collections.abc import Sequence

from flopwise.advice.moves import Move, with_levers
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
        changed = with_levers(current, levers) if len(levers) >= FEWEST else None
        if changed is None:
            continue
        (lever, value), *rest = levers.items()
        move = Move(lever=lever, value=value, workload=changed, also=dict(rest))
        if move.name not in tried:
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
