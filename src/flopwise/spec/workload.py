"""What is run: a model, an operation or the user's own step, with its size, phase and recipe; and how it is sampled."""

import hashlib
import re
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields, hf_config
from flopwise.spec.model import ModelSpec, preset
from flopwise.spec.recipe import CHOICES, LEVERS, OWN_OPTIMIZERS, Recipe, recipe_from

PHASES = ("forward", "backward", "train")
IMPLEMENTATIONS = ("flopwise", "transformers")


class OpSpec(msgspec.Struct, frozen=True, kw_only=True, tag="op"):
    """One operation with its dimensions.

    >>> op("matmul", {"dim": 512}).dims
    {'m': 512, 'n': 512, 'k': 512}
    """

    name: str
    dims: dict[str, int]
    impl: str = ""  # one of the operation's implementations; '': as the levers say


class UserStep(msgspec.Struct, frozen=True, kw_only=True, tag="py"):
    """The user's own step: `module:factory` (docs/reference/own-step.md)."""

    reference: str


class _Op(msgspec.Struct, frozen=True, kw_only=True):
    dims: dict[str, int]
    batch: int = 1
    context: int = 1
    phase: str = "forward"
    takes: tuple[str, ...] = ()  # of batch and context
    levers: tuple[str, ...] = ("precision", "compile", "graph")
    impls: tuple[str, ...] = ()
    impl: str = ""  # where none is given; '': then its levers decide


_MATRIX = {"rows": 4096, "cols": 4096}
_WITH_IMPL = ("precision", "graph")  # levers that an implementation leaves open

# Levers for a user's own step, applied without its code (capture/applied_levers.py); the first of each leaves it as written.
FROM_OUTSIDE: dict[str, tuple[str | int, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16"),
    "attention": ("sdpa", "sdpa-flash", "sdpa-cudnn"),
    "optimizer": ("foreach", "fused"),
    "compile": CHOICES["compile"],
    "graph": CHOICES["graph"],
    "checkpoint": (0, 1),
}

OPS = {
    "matmul": _Op(dims={"m": 4096, "n": 4096, "k": 4096}),
    # The lecture's MLP: linear and GeLU, four times, and `steps` forward and backward passes on one batch.
    "mlp": _Op(
        dims={"dim": 256, "layers": 4, "steps": 2},
        batch=256,
        takes=("batch",),
        phase="backward",
        levers=("precision", "activation", "compile", "graph"),
    ),
    # Attention as the course measures it: one head, `dim` wide, causal.
    "attention": _Op(
        dims={"dim": 64},
        batch=8,
        context=1024,
        takes=("batch", "context"),
        phase="backward",
        levers=("precision", "attention", "compile", "graph"),
        impls=("naive", "sdpa", "sdpa-flash", "sdpa-cudnn", "flex", "tiled", "flash"),
    ),
    "gelu": _Op(
        dims=_MATRIX,
        levers=("precision", "activation", "compile", "graph"),
        impls=("manual", "torch", "compile", "cuda", "triton"),
    ),
    "softmax": _Op(
        dims=_MATRIX, levers=("precision", "norm", "compile", "graph"), impls=("manual", "torch", "compile", "triton")
    ),
    "rms_norm": _Op(dims=_MATRIX, levers=_WITH_IMPL, impls=("manual", "torch", "compile", "triton"), impl="torch"),
    "swiglu": _Op(dims=_MATRIX, levers=_WITH_IMPL, impls=("manual", "torch", "compile", "triton"), impl="torch"),
    "rope": _Op(
        dims={"heads": 16, "dim": 128},
        batch=4,
        context=2048,
        takes=("batch", "context"),
        levers=_WITH_IMPL,
        impls=("manual", "compile", "triton"),
        impl="manual",
    ),
    # Of hidden states through the head's weight.
    "cross_entropy": _Op(
        dims={"rows": 4096, "dim": 1024, "vocab": 32_000},
        phase="backward",
        levers=_WITH_IMPL,
        impls=("full", "compile", "chunked", "fused"),
        impl="full",
    ),
    # One update of `tensors` weights.
    "adamw": _Op(
        dims={"tensors": 100, "rows": 1024, "cols": 1024},
        levers=_WITH_IMPL,
        impls=("adamw-loop", "foreach", "fused", "flopwise", "flopwise-bf16"),
        impl="foreach",
    ),
}


def op(name: str, dims: dict[str, Any], impl: str = "") -> OpSpec:
    """An operation by name; `dims` replaces its defaults (`dim` sets all three sides of a matmul)."""
    if name not in OPS:
        raise FlopwiseError(
            f"there is no operation {fields.show('op:' + name)}",
            f"{fields.did_you_mean(name, OPS)}operations: op:{', op:'.join(OPS)}",
        )
    if name == "matmul" and "dim" in dims:
        dims = {"m": dims["dim"], "n": dims["dim"], "k": dims["dim"]} | {d: v for d, v in dims.items() if d != "dim"}
    fields.known(f"op:{name}", dims, OPS[name].dims)
    for field, value in dims.items():
        fields.whole(field, value, 1, 2**31)
    if name == "rope" and dims.get("dim", 0) % 2:
        raise FlopwiseError(f"dim = {dims['dim']} is odd, and op:rope turns pairs", "give an even dim")
    if impl and not OPS[name].impls:
        raise FlopwiseError(f"impl = {fields.show(impl)} means nothing to op:{name}", "it has one implementation")
    if impl:
        fields.one_of("impl", impl, OPS[name].impls)
    return OpSpec(name=name, dims=OPS[name].dims | dims, impl=impl or OPS[name].impl)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. Build one with `workload(...)`, which fills the defaults and checks every field."""

    target: str  # as the user typed it
    subject: ModelSpec | OpSpec | UserStep
    batch: int
    context: int
    phase: str
    recipe: Recipe
    implementation: str = "flopwise"
    changes: dict[str, Any] = {}  # of the model's or the operation's fields, as the user set them
    hf_config: dict[str, Any] | None = None  # kept only where the transformers model itself is built

    def label(self) -> str:
        """One line that tells this workload from its neighbours.

        >>> workload("small", precision="bf16").label()
        'small b4 t512 train precision=bf16'
        """
        subject = self.subject
        words = [self.target]
        words += [subject.impl] if isinstance(subject, OpSpec) and subject.impl else []
        words += [f"{d}={v}" for d, v in (subject.dims if isinstance(subject, OpSpec) else self.changes).items()]
        words += [
            f"{sign}{getattr(self, name)}"
            for name, sign in (("batch", "b"), ("context", "t"))
            if name in takes(subject)
        ]
        words += [self.phase] if "phase" in takes(subject) else []
        words += [f"{f}={v}" for f, v in self.recipe.changed().items()]
        words += [self.implementation] if self.implementation != "flopwise" else []
        return " ".join(words)


def workload(target: str, *, set: dict[str, Any] | None = None, **options: Any) -> Workload:  # noqa: A002
    """A workload from what a user types: a target, a size, a phase and levers.

    `set` changes fields of the model (`n_layers=2`) or dimensions of the operation (`dim=512`).

    >>> workload("op:attention", context=4096).batch
    8
    """
    fields.text("workload", target)
    if not isinstance(set, dict | None):
        raise FlopwiseError(f"set = {fields.show(set)} is not allowed", "allowed: a table of fields, like n_layers = 2")
    changes = dict(set or {})
    fields.known("a workload", options, ("batch", "context", "phase", "recipe", "implementation", "impl", *LEVERS))
    base = Recipe() if options.get("recipe") is None else options["recipe"]
    if not isinstance(base, Recipe):
        raise FlopwiseError(f"recipe = {fields.show(base)} is not allowed", "allowed: a Recipe; or name its levers")
    recipe = recipe_from(msgspec.structs.asdict(base) | {k: options[k] for k in LEVERS if options.get(k) is not None})
    implementation = "flopwise" if options.get("implementation") is None else options["implementation"]
    fields.one_of("implementation", implementation, IMPLEMENTATIONS)
    subject, config = _subject(target, changes, options.get("impl") or "")
    if implementation == "transformers" and config is None:
        raise FlopwiseError(
            f"implementation = 'transformers' needs a config, and {fields.show(target)} has none",
            "use hf:PATH/config.json",
        )
    for name in ("batch", "context", "phase"):
        if options.get(name) is not None and name not in takes(subject):
            raise FlopwiseError(
                f"{name} = {fields.show(options[name])} means nothing to {fields.show(target)}",
                f"it takes {', '.join(takes(subject)) or 'none of batch, context and phase'}",
            )
    default_batch, default_context, default_phase = _defaults(subject)
    result = Workload(
        target=target,
        subject=subject,
        batch=default_batch if options.get("batch") is None else options["batch"],
        context=default_context if options.get("context") is None else options["context"],
        phase=default_phase if options.get("phase") is None else options["phase"],
        recipe=recipe,
        implementation=implementation,
        changes=changes,
        hf_config=_built_from(config, subject, changes, target) if implementation == "transformers" else None,
    )
    _check(result)
    return result


def _subject(
    target: str, changes: dict[str, Any], impl: str
) -> tuple[ModelSpec | OpSpec | UserStep, dict[str, Any] | None]:
    if target.startswith("op:"):
        return op(target.removeprefix("op:"), changes, impl), None
    if impl:
        raise FlopwiseError(
            f"impl = {fields.show(impl)} means nothing to {fields.show(target)}",
            "it belongs to operations (op:gelu); a model has levers",
        )
    if target.startswith("py:"):
        reference = target.removeprefix("py:")
        if not re.fullmatch(r"[\w.]+:[\w.]+", reference):
            raise FlopwiseError(
                f"{fields.show(target)} is not py:module:factory", "for example py:my_project.steps:make_step"
            )
        if changes:
            raise FlopwiseError(
                f"{fields.show(target)} has no fields to set", "a step of your own is shaped by its factory"
            )
        return UserStep(reference=reference), None
    if target.startswith("hf:"):
        spec, config = hf_config.read(target.removeprefix("hf:"))
        return spec.with_fields(changes), config
    spec = preset(target)
    return (spec.with_fields(changes) if changes else spec), None


def _built_from(
    config: dict[str, Any] | None, subject: ModelSpec | OpSpec | UserStep, changes: dict[str, Any], target: str
) -> dict[str, Any] | None:
    """The config that transformers builds from: the file's, with the user's changes."""
    if config is None or not changes or not isinstance(subject, ModelSpec):
        return config
    return hf_config.with_changes(config, subject, target.removeprefix("hf:"))


def _defaults(subject: ModelSpec | OpSpec | UserStep) -> tuple[int, int, str]:
    if isinstance(subject, OpSpec):
        known = OPS[subject.name]
        return known.batch, known.context, known.phase
    if isinstance(subject, ModelSpec):
        context = 128 if subject.name == "tiny" else 512
        return 4, min(context, subject.max_context or context), "train"
    return 1, 1, "train"


def _check(w: Workload) -> None:
    fields.whole("batch", w.batch, 1, 10_000_000)
    fields.whole("context", w.context, 1, 100_000_000)
    fields.one_of("phase", w.phase, PHASES)
    if isinstance(w.subject, ModelSpec):
        limit = w.subject.max_context
        if limit and w.context > limit:
            raise FlopwiseError(
                f"context = {w.context} is longer than the model's {limit}",
                f"allowed: 1 to {limit}; or raise max_context",
            )
        if w.subject.window and w.context > w.subject.window and w.implementation == "flopwise":
            raise FlopwiseError(
                f"context = {w.context} is longer than the sliding window of {w.subject.window}, which flopwise's model has not",
                f"allowed: 1 to {w.subject.window}; or implementation = transformers",
            )
        _check_kernels(w.subject, w.recipe)
        if w.recipe.precision == "bf16-master" and w.phase == "train" and w.recipe.optimizer not in OWN_OPTIMIZERS:
            raise FlopwiseError(
                f"precision = 'bf16-master' needs an optimizer that keeps masters, and {w.recipe.optimizer} does not",
                f"allowed: optimizer = {' or '.join(OWN_OPTIMIZERS)}",
            )
        if w.recipe.graph == "on" and w.phase != "train":
            raise FlopwiseError(
                f"graph = 'on' captures the whole training step, not phase = '{w.phase}'", "allowed: phase = train"
            )
        if w.recipe.overlap == "on" and w.phase != "train":
            raise FlopwiseError(
                f"overlap = 'on' is about the optimizer, and phase = '{w.phase}' has none", "allowed: phase = train"
            )
        return
    unknown = [f for f in w.recipe.changed() if f not in levers(w.subject)]
    if unknown:
        raise FlopwiseError(
            f"{unknown[0]} = {fields.show(getattr(w.recipe, unknown[0]))} means nothing to {w.target}",
            f"levers it has: {', '.join(levers(w.subject))}",
        )
    if isinstance(w.subject, UserStep):
        _check_from_outside(w)
    if isinstance(w.subject, OpSpec) and w.recipe.compile == "blocks":
        raise FlopwiseError(
            f"compile = 'blocks' means nothing to {w.target}: it has none",
            "allowed: compile = off, default, max-autotune",
        )
    if isinstance(w.subject, OpSpec) and w.recipe.precision == "bf16-master" and w.subject.impl not in OWN_OPTIMIZERS:
        raise FlopwiseError(
            f"precision = 'bf16-master' means nothing to {w.target}: masters are kept by our optimizer",
            "allowed: bf16-pure; or op:adamw --impl flopwise",
        )
    if isinstance(w.subject, OpSpec) and w.subject.name == "adamw" and w.phase != "forward":
        raise FlopwiseError(f"phase = '{w.phase}' means nothing to op:adamw: it is one update", "leave phase out")
    if isinstance(w.subject, OpSpec) and w.phase == "train":
        raise FlopwiseError(
            f"phase = 'train' means nothing to {w.target}: it has no optimizer", "allowed: forward, backward"
        )


def _check_from_outside(w: Workload) -> None:
    for lever, allowed in FROM_OUTSIDE.items():
        value = getattr(w.recipe, lever)
        if value not in allowed:
            words = ", ".join("off" if word == 0 else str(word) for word in allowed)
            raise FlopwiseError(
                f"{lever} = {fields.show(value)} cannot be applied to {w.target} from outside", f"allowed: {words}"
            )


def _check_kernels(spec: ModelSpec, recipe: Recipe) -> None:
    """Levers whose kernels compute something else than this model has."""
    if recipe.norm == "triton" and spec.norm_kind != "rms":
        raise FlopwiseError(
            f"norm = 'triton' is a kernel for RMSNorm, and {spec.name} has norm_kind = '{spec.norm_kind}'",
            "allowed: norm = eager, torch; or a model with norm_kind = rms",
        )
    if recipe.activation == "cuda" and spec.mlp != "gelu":
        raise FlopwiseError(
            f"activation = 'cuda' is a kernel for GeLU, and {spec.name} has mlp = '{spec.mlp}'",
            "allowed: activation = eager, torch, triton; or a model with mlp = gelu",
        )
    if recipe.rope == "triton" and spec.positions != "rope":
        raise FlopwiseError(
            f"rope = 'triton' turns queries and keys, and {spec.name} has positions = '{spec.positions}'",
            "allowed: rope = eager; or a model with positions = rope",
        )


def takes(subject: ModelSpec | OpSpec | UserStep) -> tuple[str, ...]:
    """Which of batch, context and phase mean something to a workload.

    >>> takes(op("gelu", {})), takes(preset("tiny"))
    (('phase',), ('batch', 'context', 'phase'))
    """
    if isinstance(subject, UserStep):
        return ()
    return (*OPS[subject.name].takes, "phase") if isinstance(subject, OpSpec) else ("batch", "context", "phase")


def levers(subject: OpSpec | UserStep | ModelSpec) -> tuple[str, ...]:
    if isinstance(subject, OpSpec):
        return _WITH_IMPL if subject.impl else OPS[subject.name].levers
    return tuple(FROM_OUTSIDE) if isinstance(subject, UserStep) else LEVERS


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How often a workload is measured: until it is precise enough, or the budget ends.

    >>> Sampling(warmup=0, samples=10).samples
    10
    """

    warmup: int | None = None  # None: until steady
    samples: int | None = None  # None: until precise enough; else exactly so many
    seconds: float = 10.0  # the budget for sampling, after warm-up
    half_width: float = 0.01  # of the median's 95 % interval, as a share of it
    timeout_s: float = 900.0  # then the process is ended and what it had measured is kept

    def __post_init__(self) -> None:
        if self.warmup is not None:
            fields.whole("warmup", self.warmup, 0, 1_000_000)
        if self.samples is not None:
            fields.whole("samples", self.samples, 1, 1_000_000)
        fields.number("seconds", self.seconds, 0.01, 86_400)
        fields.number("half_width", self.half_width, 0.0001, 1.0)
        fields.number("timeout_s", self.timeout_s, 1.0, 7 * 86_400)
        for field in ("seconds", "half_width", "timeout_s"):  # 10 and 10.0 are one trial, with one key
            msgspec.structs.force_setattr(self, field, float(getattr(self, field)))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure: a workload, how to sample it, and where."""

    workload: Workload
    sampling: Sampling
    device: str = "auto"
    group: str = ""

    def __post_init__(self) -> None:
        fields.text("group", self.group)
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", self.device):
            raise FlopwiseError(
                f"device = {fields.show(self.device)} is not allowed", "allowed: auto, cpu, cuda, cuda:N"
            )

    def key(self) -> str:
        """The trial's identity: equal for equal trials, on any machine.

        >>> w = workload("tiny")
        >>> Trial(workload=w, sampling=Sampling()).key() == Trial(workload=workload("tiny"), sampling=Sampling()).key()
        True
        """
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]
