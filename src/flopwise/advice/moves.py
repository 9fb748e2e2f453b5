"""The moves that `tune` may try from a recipe: one lever changed at a time, and those that only pay together."""

from collections.abc import Sequence

import msgspec

from flopwise.advice import constants
from flopwise.errors import FlopwiseError
from flopwise.predict.prediction import peak_bytes
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import CHOICES, FP8, LEVERS, OWN_OPTIMIZERS, REPLAYED, WHOLE, WITH_MASTERS, Recipe, named
from flopwise.spec.workload import UserStep, Workload, levers, varied

# What is worth a try, in the order of a first guess; a value that is never faster or smaller is not listed.
TRIED: dict[str, tuple[str, ...]] = {
    "precision": ("bf16", "bf16-master", "tf32"),
    "attention": ("sdpa", "sdpa-cudnn", "flash", "sdpa-flash"),
    "graph": ("on",),
    "compile": ("default", "blocks", "reduce-overhead", "off"),
    "optimizer": ("fused", "flopwise", "flopwise-bf16"),
    "loss": ("fused", "chunked", "full"),
    "norm": ("torch", "triton"),
    "activation": ("torch", "triton"),
    "rope": ("triton", "eager"),
    "projections": ("fused", "separate"),
    "overlap": ("on", "off"),
}
# What is tried only where it is allowed by name, as it rounds more than bf16. Scales of rows were never faster (fp8-2026-11.md).
ON_REQUEST: dict[str, dict[str, tuple[str, ...]]] = {"fp8": {"precision": ("fp8",)}}
COSTS = {  # of what is allowed so, in accuracy
    "fp8": "fp8 is allowed: each matmul of a linear layer is 4 to 6 % off (bf16: 0.2 %); over 2,000 steps of small on real text, "
    "the mean held-out loss of three seeds lies inside the spread of bf16's. Longer runs and other models were not measured"
}
# What changes results beyond fp32's rounding.
ROUNDED = {"precision": ("tf32", "bf16", "fp16", "bf16-pure", "bf16-master", *FP8), "optimizer": ("flopwise-bf16",)}
HALF_ONLY = ("sdpa-flash", "sdpa-cudnn")  # backends without kernels for fp32
# What runs on a GPU only, or is not worth trying on a CPU: there our kernels fall back to eager PyTorch.
GPU_ONLY = {
    "graph": ("on",),
    "compile": (REPLAYED,),
    "attention": ("sdpa-cudnn", "flash"),
    "norm": ("triton",),
    "activation": ("triton",),
    "rope": ("triton",),
    "optimizer": ("flopwise", "flopwise-bf16"),
    "precision": ("tf32", "bf16-master", *FP8),
    "overlap": ("on",),  # on a CPU nothing overlaps
}
# What saves memory, each lever's best; not the compiler and graphs, which are for speed, nor weights in bf16.
SMALLER = {
    "attention": ("sdpa",),
    "precision": ("bf16",),
    "activation": ("torch", "triton"),
    "norm": ("torch",),
    "loss": ("fused",),
    "optimizer": ("flopwise", "flopwise-bf16"),
    "checkpoint": ("1",),
}
# A compiler cannot look into our kernels: it may do better with what it can fuse itself.
FOR_THE_COMPILER = {"norm": "torch", "activation": "torch", "rope": "eager"}
REDONE_BY = ("compile", "precision", "graph")  # levers after which a move that failed may be worth another try


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One lever's new value, what else goes with it, and the workload then."""

    lever: str
    value: str
    workload: Workload
    also: dict[str, str] = {}

    @property
    def levers(self) -> dict[str, str]:
        return {self.lever: self.value, **self.also}

    @property
    def name(self) -> str:
        return named(self.levers)


def moves(
    current: Workload,
    *,
    keep_exact: bool = False,
    smaller: bool = False,
    on_gpu: bool = True,
    allow: Sequence[str] = (),
) -> list[Move]:
    """Every move from here that the workload and the machine allow.

    `keep_exact` leaves out what rounds more than fp32 does; `smaller` adds checkpointing, which costs time; `allow` adds
    what is tried on request only.

    >>> from flopwise.spec.workload import workload
    >>> [move.name for move in moves(workload("tiny"), keep_exact=True)][:3]
    ['attention = flash', 'graph = on', 'compile = default']
    """
    found = []
    for lever, values in _tried(current, smaller, allow).items():
        for value in values:
            if str(getattr(current.recipe, lever)) == value or (keep_exact and value in ROUNDED.get(lever, ())):
                continue
            if (not on_gpu and value in GPU_ONLY.get(lever, ())) or _pointless(current, lever, value):
                continue
            found += [
                Move(lever=lever, value=value, workload=changed, also=also)
                for also in _together(current, lever, value)
                if (changed := with_levers(current, {lever: value, **also})) is not None
            ]
    return found


# complexity: a table of cases
def _pointless(current: Workload, lever: str, value: str) -> bool:
    """Whether what a step has already leaves a lever nothing to gain; of our own model, predictions say so."""
    recipe, half = current.recipe, current.recipe.compute in ("bf16", "fp16")
    if lever == "overlap" and value == "off":
        return recipe.overlap == "off"
    if lever == "precision" and half and value == "tf32":
        return True
    if value == REPLAYED and current.own_model is not None:  # one graph for the whole step is never slower
        return with_levers(current, {"graph": "on"}) is not None or recipe.graph == "on"
    if not isinstance(current.subject, UserStep):
        return current.generates and lever in ("optimizer", "loss", "overlap", "checkpoint")
    whole, own = recipe.compile in WHOLE, recipe.optimizer in OWN_OPTIMIZERS
    return {
        "precision": half and value == "bf16",
        "attention": value == "sdpa" and recipe.attention != "naive",
        "optimizer": own and value == "fused",
        "compile": value == "off" or current.subject.written.compile != "off",
        "loss": value != "fused" or current.subject.written.compile != "off",
        "norm": value != "triton" or recipe.compile != "off",  # a compiler fuses these itself
        "activation": value != "triton" or recipe.compile != "off",
        "rope": value != "triton" or recipe.compile != "off",
        "projections": value != "fused",
        "overlap": whole and value == "on",  # a whole model's backward pass hands over all gradients at its end
    }.get(lever, False)


def _together(current: Workload, lever: str, value: str) -> list[dict[str, str]]:
    """What else changes with a lever: to a compiler, our kernels are walls; masters are kept by our optimizer."""
    if lever == "graph" and current.recipe.compile == REPLAYED:
        return [{"compile": "default"}]
    if isinstance(current.subject, UserStep):
        needs_own = (lever == "precision" and value in WITH_MASTERS) or (lever, value) == ("overlap", "on")
        return [{"optimizer": "flopwise"} if needs_own and current.recipe.optimizer not in OWN_OPTIMIZERS else {}]
    if lever != "compile" or value == "off":
        return [{}]
    own = {name: better for name, better in FOR_THE_COMPILER.items() if getattr(current.recipe, name) == "triton"}
    return [{}, own] if own else [{}]


def seconds_to_try(move: Move) -> float:
    """About how long it takes to measure a move: what is compiled takes several times as long as what is not.

    >>> from flopwise.spec.workload import workload
    >>> seconds_to_try(Move(lever="graph", value="on", workload=workload("small", graph="on")))
    6.0
    """
    subject, compile_ = move.workload.subject, move.workload.recipe.compile
    layers = subject.n_layers if isinstance(subject, ModelSpec) else constants.UNKNOWN_LAYERS
    whole = constants.SECONDS_TO_COMPILE + constants.SECONDS_PER_LAYER * layers
    return constants.SECONDS_TO_TRY + {"off": 0.0, "blocks": constants.SECONDS_PER_BLOCK}.get(compile_, whole)


def _tried(current: Workload, smaller: bool, allow: Sequence[str]) -> dict[str, tuple[str, ...]]:
    allowed = LEVERS if isinstance(current.subject, ModelSpec) else levers(current.subject)
    tried = {lever: values for lever, values in with_requested(allow).items() if lever in allowed and lever in CHOICES}
    checkpoint = current.recipe.checkpoint
    if "checkpoint" in allowed:
        tried["checkpoint"] = ("0",) if checkpoint else ("1",) if smaller else ()
    return tried


def with_requested(allow: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """TRIED, and what is allowed by name.

    >>> with_requested(["fp8"])["precision"]
    ('bf16', 'bf16-master', 'tf32', 'fp8')
    """
    return {
        lever: (*values, *(value for name in allow for value in ON_REQUEST[name].get(lever, ())))
        for lever, values in TRIED.items()
    }


def with_levers(current: Workload, changed: dict[str, str]) -> Workload | None:
    """The workload with levers changed; None where they do not go together."""
    try:
        new = {lever: int(value) if lever == "checkpoint" else value for lever, value in changed.items()}
        recipe = Recipe(**(msgspec.structs.asdict(current.recipe) | new))
        if changed.get("attention") in HALF_ONLY and recipe.compute not in ("bf16", "fp16"):
            return None
        return varied(current, recipe=recipe, optimizer=recipe.optimizer)
    except FlopwiseError:
        return None


def to_fit(start: Workload, gpu: Gpu | None, room_bytes: float, *, keep_exact: bool = False) -> list[Move]:
    """Moves after which a step that is too large is predicted to fit `room_bytes`; [] if none are enough.

    One after the other, always the one that saves most memory; checkpointing, which costs time, only if nothing else helps.

    >>> from flopwise.spec.gpu import gpu
    >>> from flopwise.spec.workload import workload
    >>> large = workload("large", batch=16, context=1024, attention="naive", norm="eager")
    >>> [move.name for move in to_fit(large, gpu("h200"), 80e9)]
    ['attention = sdpa', 'precision = bf16']
    """
    for smaller in (False, True):
        current, peak, taken = start, peak_bytes(start, gpu), list[Move]()
        while peak is not None and peak > room_bytes:
            allowed = moves(current, keep_exact=keep_exact, smaller=smaller)
            known = [move for move in allowed if move.value in SMALLER.get(move.lever, ())]
            peaks = [peak_bytes(move.workload, gpu) or peak for move in known]
            if min(peaks, default=peak) >= peak:
                break
            taken.append(known[peaks.index(min(peaks))])
            peak, current = min(peaks), taken[-1].workload
        else:
            return taken
    return []


def reference_of(start: Workload, *, lighter: bool = False) -> Workload:
    """The same step in eager fp32: what losses and gradients are compared with. Of a user's step, what is written.

    `lighter`: fp32 still, but with what takes little memory: fused attention, and each block's forward pass done twice.

    >>> from flopwise.spec.workload import workload
    >>> reference_of(workload("tiny", precision="bf16", attention="sdpa")).label()
    'tiny b4 t128 train attention=naive norm=eager activation=eager'
    """
    if isinstance(start.subject, UserStep):
        return msgspec.structs.replace(start, recipe=start.subject.written)
    if not isinstance(start.subject, ModelSpec):
        return start
    if lighter:
        return msgspec.structs.replace(start, recipe=Recipe(checkpoint=int(start.trains)))
    eager = Recipe(attention="naive", norm="eager", activation="eager")
    return msgspec.structs.replace(start, recipe=eager if start.implementation == "flopwise" else Recipe())
