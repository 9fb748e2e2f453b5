"""What is run: a model, an operation or the user's own step, with its size, phase and recipe; and how it is sampled."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError, one_line
from flopwise.spec import fields, hf_config
from flopwise.spec.dtypes import named
from flopwise.spec.fp8 import fp8_rules
from flopwise.spec.model import ModelSpec, preset
from flopwise.spec.operations import OPS, WITH_IMPL, OpSpec, least_bytes, op
from flopwise.spec.parallel import parallel_rules
from flopwise.spec.recipe import CHOICES, FP8, LEVERS, OWN_OPTIMIZERS, REPLAYED, WITH_MASTERS, Recipe, recipe_from
from flopwise.spec.user_step import check_arguments, is_user_step, reference_in

PHASES = ("forward", "backward", "train", "prefill", "decode")
GENERATION = ("prefill", "decode")  # with a cache of keys and values
CACHED_ATTENTION = ("naive", "sdpa", "sdpa-flash", "sdpa-cudnn")  # which also see a past without a mask
PROFILERS = KINETO, NSYS = "kineto", "nsys"
IMPLEMENTATIONS = ("flopwise", "transformers")
_SIZES = ("batch", "context", "phase")
_PLAIN, _LATER = Recipe(), ("parallel", "cache", "ranks")


class UserStep(msgspec.Struct, frozen=True, kw_only=True, tag="py"):
    """The user's own step (docs/reference/own-step.md)."""

    reference: str  # `module:factory` or `path/file.py:factory`
    arguments: dict[str, Any] = {}  # keyword arguments of the factory
    pickled: str = ""  # the hash of a function that no name leads to; '': it is loaded by its name
    written: Recipe = Recipe()  # what the step's own code does already: only what a recipe has otherwise is put onto it


Subject = ModelSpec | OpSpec | UserStep


# Levers for a user's own step, applied without its code (capture/applied_levers.py); the first of each leaves it as written.
FROM_OUTSIDE: dict[str, tuple[str | int, ...]] = {
    "precision": CHOICES["precision"],
    "attention": ("naive", "sdpa", "sdpa-flash", "sdpa-cudnn"),
    "norm": ("eager", "torch", "triton"),
    "activation": ("eager", "torch", "triton"),
    "rope": CHOICES["rope"],
    "projections": CHOICES["projections"],
    "loss": ("full", "fused"),
    "optimizer": CHOICES["optimizer"],
    "compile": CHOICES["compile"],
    "graph": CHOICES["graph"],
    "overlap": CHOICES["overlap"],
    "checkpoint": (0, 1),
}


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. Build one with `workload(...)`, which fills the defaults and checks every field."""

    target: str  # as the user typed it
    subject: Subject
    batch: int
    context: int
    phase: str
    recipe: Recipe
    implementation: str = "flopwise"
    changes: dict[str, Any] = {}  # fields of the model or operation, or arguments of the factory, as the user set them
    hf_config: dict[str, Any] | None = None  # kept only where the transformers model itself is built

    @property
    def own_model(self) -> ModelSpec | None:
        """The model, where flopwise's own code runs it: then its shapes say all that a step does.

        >>> workload("small").own_model.n_layers, workload("op:gelu").own_model
        (12, None)
        """
        own = isinstance(self.subject, ModelSpec) and self.implementation == "flopwise" and not self.generates
        return self.subject if own else None  # type: ignore[return-value]

    @property
    def generates(self) -> bool:
        """Whether it is a step of generation: a prompt, or one token of each sequence."""
        return self.phase in GENERATION

    @property
    def many(self) -> bool:
        """Whether ranks do it together: torchrun starts them, also where there is one."""
        return self.recipe.parallel != "off" or (isinstance(self.subject, OpSpec) and self.subject.collective)

    @property
    def backend(self) -> str:
        """Of a collective, by which its ranks exchange messages; '': by the one that fits the device."""
        return self.subject.impl if isinstance(self.subject, OpSpec) and self.subject.collective else ""

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.phase in ("backward", "train")

    def label(self) -> str:
        """One line that distinguishes this workload from others.

        >>> workload("small", precision="bf16").label()
        'small b4 t512 train precision=bf16'
        """
        subject = self.subject
        words = [self.target, subject.impl if isinstance(subject, OpSpec) else ""]
        own = subject.dims if isinstance(subject, OpSpec) else self.changes
        words += ["causal=off"] if isinstance(subject, OpSpec) and not subject.causal else []
        words += [f"{name}={one_line(str(value), 60)}" for name, value in own.items()]
        sizes = {"batch": f"b{self.batch}", "context": f"t{self.context}", "phase": self.phase}
        words += [text for name, text in sizes.items() if name in takes(subject)]
        words += [f"{f}={v}" for f, v in self.recipe.changed().items()]
        words += [self.implementation] if self.implementation != "flopwise" else []
        return " ".join(word for word in words if word)


def workload(target: str, *, set: dict[str, Any] | None = None, **options: Any) -> Workload:  # noqa: A002
    """A workload from what a user types: a target, a size, a phase and levers.

    `set` changes fields of the model (`n_layers=2`) or dimensions of the operation (`dim=512`); for a step of the user's own
    it has the factory's arguments.

    >>> workload("op:attention", context=4096).batch
    8
    """
    fields.text("workload", target)
    if not isinstance(set, dict | None):
        raise FlopwiseError(f"set = {fields.show(set)} is not allowed", "allowed: a table of fields, like n_layers = 2")
    fields.known("a workload", options, (*_SIZES, "recipe", "implementation", "impl", *LEVERS))
    changes, given = dict(set or {}), {name: value for name, value in options.items() if value is not None}
    implementation = given.get("implementation", "flopwise")
    fields.one_of("implementation", implementation, IMPLEMENTATIONS)
    subject, config = _subject(target, changes, given.get("impl", ""))
    recipe = _recipe(subject, _with_ranks(target, given))
    if isinstance(subject, UserStep) and given.get("attention") == "sdpa":  # the default, asked for by name
        subject = msgspec.structs.replace(subject, written=Recipe(attention="naive"))
    if implementation == "transformers" and config is None:
        raise FlopwiseError(
            f"implementation = 'transformers' needs a config, and {fields.show(target)} has none",
            "use hf:PATH/config.json",
        )
    if implementation == "flopwise":
        config = None
    elif config and changes and isinstance(subject, ModelSpec):
        config = hf_config.with_changes(config, subject, target.removeprefix("hf:"))
    result = Workload(
        target=target,
        subject=subject,
        **_sizes(target, subject, given),
        recipe=recipe,
        implementation=implementation,
        changes=changes,
        hf_config=config,
    )
    check(result)
    return result


def varied(known: Workload, *, set: dict[str, Any] | None = None, **options: Any) -> Workload:  # noqa: A002
    """A workload with some of its options changed, checked as one that is typed anew.

    >>> varied(workload("small", batch=2), set={"n_layers": 3}, precision="bf16").label()
    'small n_layers=3 b2 t512 train precision=bf16'
    """
    subject, names = known.subject, ("implementation", "recipe", *takes(known.subject))
    same = {name: getattr(known, name) for name in names}
    same |= {"impl": subject.impl} if isinstance(subject, OpSpec) else {}
    made = workload(known.target, set=known.changes | (set or {}), **(same | options))
    if isinstance(subject, UserStep) and isinstance(made.subject, UserStep):
        kept = msgspec.structs.replace(subject, arguments=made.subject.arguments)
        return msgspec.structs.replace(made, subject=kept)
    return made


def _sizes(target: str, subject: Subject, given: dict[str, Any]) -> dict[str, Any]:
    asked = {name: given[name] for name in _SIZES if name in given}
    for name, value in asked.items():
        if name not in takes(subject):
            own = f"; --set {name}=… gives it to the factory" if isinstance(subject, UserStep) else ""
            raise FlopwiseError(
                f"{name} = {fields.show(value)} means nothing to {fields.show(target)}",
                f"it takes {', '.join(takes(subject)) or 'none of batch, context and phase'}{own}",
            )
    return dict(zip(_SIZES, _defaults(subject), strict=True)) | asked


def _with_ranks(target: str, given: dict[str, Any]) -> dict[str, Any]:
    """A collective has two ranks, unless others are given."""
    known = OPS.get(target.removeprefix("op:")) if target.startswith("op:") else None
    return {"ranks": known.ranks} | given if known is not None and "recipe" not in given else given


def _recipe(subject: Subject, given: dict[str, Any]) -> Recipe:
    """The levers. Masters are kept by our optimizer: it comes with them, unless one is named."""
    base = given.get("recipe", Recipe())
    if not isinstance(base, Recipe):
        raise FlopwiseError(f"recipe = {fields.show(base)} is not allowed", "allowed: a Recipe; or name its levers")
    recipe = recipe_from(msgspec.structs.asdict(base) | {lever: given[lever] for lever in LEVERS if lever in given})
    named = "optimizer" in given or recipe.optimizer != Recipe().optimizer
    trains = isinstance(subject, ModelSpec) and given.get("phase", "train") == "train"
    comes = trains and recipe.precision in WITH_MASTERS and not named
    return msgspec.structs.replace(recipe, optimizer="flopwise") if comes else recipe


def _subject(target: str, changes: dict[str, Any], impl: str) -> tuple[Subject, dict[str, Any] | None]:
    shown = fields.show(target)
    if target.startswith("op:"):
        return op(target.removeprefix("op:"), changes, impl), None
    if impl:
        hint = "it belongs to operations (op:gelu); a model has levers"
        raise FlopwiseError(f"impl = {fields.show(impl)} means nothing to {shown}", hint)
    if is_user_step(target):
        return UserStep(reference=reference_in(target), arguments=check_arguments(target, changes)), None
    if target.startswith("hf:"):
        spec, config = hf_config.read(target.removeprefix("hf:"))
        return spec.with_fields(changes), config
    spec = preset(target)
    return (spec.with_fields(changes) if changes else spec), None


def _defaults(subject: Subject) -> tuple[int, int, str]:
    if isinstance(subject, OpSpec):
        known = OPS[subject.name]
        return known.batch, known.context, known.phase
    if isinstance(subject, ModelSpec):
        context = 128 if subject.name == "tiny" else 512
        return 4, min(context, subject.max_context or context), "train"
    return 1, 1, "train"


def check(w: Workload) -> None:
    """Refuse what does not go together, in one line with a hint."""
    fields.whole("batch", w.batch, 1, 10_000_000)
    fields.whole("context", w.context, 1, 100_000_000)
    fields.one_of("phase", w.phase, PHASES)
    for lever in w.recipe.changed():
        if lever not in levers(w.subject):
            raise FlopwiseError(
                f"{lever} = {fields.show(getattr(w.recipe, lever))} means nothing to {w.target}",
                f"levers it has: {', '.join(levers(w.subject))}",
            )
    rules = {ModelSpec: _model_rules, OpSpec: _op_rules, UserStep: _outside_rules}[type(w.subject)]
    for refused, message, hint in rules(w, w.subject, w.recipe):
        if refused:
            raise FlopwiseError(message, hint)


_Rules = Iterator[tuple[object, str, str]]  # whether the workload is refused, why, and what to do
_KERNELS = (  # a lever's value, and what a model must be for what it computes
    ("norm", "triton", "norm_kind", "rms", "is a kernel for RMSNorm", "eager, torch"),
    ("activation", "cuda", "mlp", "gelu", "is a kernel for GeLU", "eager, torch, triton"),
    ("rope", "triton", "positions", "rope", "turns queries and keys", "eager"),
)


def _model_rules(w: Workload, spec: Any, recipe: Recipe) -> _Rules:
    limit, window, own = spec.max_context, spec.window, w.implementation == "flopwise"
    yield from _generation_rules(w, recipe)
    end = w.context + (w.phase == "decode")
    yield (
        limit and end > limit,
        f"context = {w.context} is longer than the model's {limit}" + " with the new token" * (w.phase == "decode"),
        f"allowed: 1 to {limit - (w.phase == 'decode')}; or raise max_context",
    )
    yield (
        window and end > window and own,
        f"context = {w.context} is longer than the sliding window of {window}, which flopwise's model does not have",
        f"allowed: 1 to {window}; or implementation = transformers",
    )
    for lever, value, field, needed, what, others in _KERNELS:
        yield (
            getattr(recipe, lever) == value and getattr(spec, field) != needed,
            f"{lever} = '{value}' {what}, and {spec.name} has {field} = '{getattr(spec, field)}'",
            f"allowed: {lever} = {others}; or a model with {field} = {needed}",
        )
    yield from parallel_rules(spec, recipe, w.batch, w.trains and w.implementation == "flopwise")
    train = w.phase == "train"
    yield (
        recipe.precision in WITH_MASTERS and train and recipe.optimizer not in OWN_OPTIMIZERS,
        f"precision = '{recipe.precision}' needs an optimizer that keeps masters, and {recipe.optimizer} does not",
        f"allowed: optimizer = {' or '.join(OWN_OPTIMIZERS)}",
    )
    if recipe.precision in FP8:
        yield from fp8_rules(spec, recipe, w.batch * w.context, w.phase, w.implementation)
    for lever, what, others in (
        ("graph", "captures a whole step", ", prefill, decode"),
        ("overlap", "is about the optimizer", ""),
    ):
        refused = getattr(recipe, lever) == "on" and not train and not (lever == "graph" and w.generates)
        yield refused, f"{lever} = 'on' {what}, and phase = '{w.phase}' has none", f"allowed: phase = train{others}"


def _generation_rules(w: Workload, recipe: Recipe) -> _Rules:
    phase = f"phase = '{w.phase}'"
    yield (
        recipe.cache != "compute" and not w.generates,
        f"cache = '{recipe.cache}' is of generation, and {phase} keeps no keys and values",
        "allowed: phase = prefill, decode",
    )
    yield (
        w.generates and w.implementation != "flopwise",
        f"{phase} runs flopwise's own model, not that of transformers",
        "omit implementation; or give a step of your own that calls model.generate",
    )
    yield (
        w.generates and recipe.attention not in CACHED_ATTENTION,
        f"attention = '{recipe.attention}' reads no cache of keys and values, which {phase} has",
        f"allowed: {', '.join(CACHED_ATTENTION)}",
    )
    yield (
        w.generates and recipe.compile == REPLAYED,
        f"compile = '{REPLAYED}' replays nothing that writes to a cache, as {phase} does",
        "allowed: compile = default; or graph = on",
    )
    yield (
        w.generates and w.context < 2,
        f"context = {w.context} is no prompt, which {phase} needs",
        "allowed: 2 and more",
    )


def _op_rules(w: Workload, subject: Any, recipe: Recipe) -> _Rules:
    if subject.collective:
        least = least_bytes(subject, recipe.ranks, named(recipe.precision).n_bytes)
        yield (
            subject.dims["bytes"] < least,
            f"bytes = {subject.dims['bytes']} is less than one element for each of {recipe.ranks} ranks",
            f"allowed: {least} and more",
        )
    yield (
        recipe.compile in ("blocks", REPLAYED),
        f"compile = '{recipe.compile}' means nothing to {w.target}: it is one operation",
        "allowed: compile = off, default, max-autotune",
    )
    yield recipe.precision in FP8, f"precision = '{recipe.precision}' means nothing to {w.target}", "allowed: bf16"
    yield (
        recipe.precision == "bf16-master" and subject.impl not in OWN_OPTIMIZERS,
        f"precision = 'bf16-master' means nothing to {w.target}: masters are kept by our optimizer",
        "allowed: bf16-pure; or op:adamw --impl flopwise",
    )
    yield (
        subject.name == "adamw" and w.phase != "forward",
        f"phase = '{w.phase}' means nothing to op:adamw: it is one update",
        "omit phase",
    )
    yield (
        w.phase not in ("forward", "backward"),
        f"phase = '{w.phase}' means nothing to {w.target}: it is one operation",
        "allowed: forward, backward",
    )


def _outside_rules(w: Workload, subject: Any, recipe: Recipe) -> _Rules:
    for lever, allowed in FROM_OUTSIDE.items():
        yield (
            getattr(recipe, lever) not in allowed,
            f"{lever} = {fields.show(getattr(recipe, lever))} cannot be applied to {w.target} from outside",
            f"allowed: {', '.join('off' if word == 0 else str(word) for word in allowed)}",
        )
    yield (
        recipe.overlap == "on" and recipe.optimizer not in OWN_OPTIMIZERS,
        f"overlap = 'on' needs flopwise's optimizer, and optimizer = '{recipe.optimizer}'",
        f"allowed: optimizer = {' or '.join(OWN_OPTIMIZERS)}",
    )


def takes(subject: Subject) -> tuple[str, ...]:
    """Which of batch, context and phase mean something to a workload.

    >>> takes(op("gelu", {})), takes(preset("tiny"))
    (('phase',), ('batch', 'context', 'phase'))
    """
    if isinstance(subject, UserStep):
        return ()
    if isinstance(subject, OpSpec):
        return () if subject.collective else (*OPS[subject.name].takes, "phase")
    return ("batch", "context", "phase")


def levers(subject: Subject) -> tuple[str, ...]:
    if isinstance(subject, OpSpec):
        return WITH_IMPL if subject.impl and not subject.collective else OPS[subject.name].levers
    return tuple(FROM_OUTSIDE) if isinstance(subject, UserStep) else LEVERS


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How often a workload is measured: until it is precise enough, or the budget ends.

    >>> Sampling(warmup=0, samples=10).samples
    10
    """

    warmup: int | None = None  # None: until steady
    samples: int | None = None  # None: until precise enough; else exactly so many, of every process
    processes: int | None = None  # None: as many as the verb finds right; else exactly so many
    seconds: float = 10.0  # the budget for sampling, after warm-up
    half_width: float = 0.01  # of the median's 95 % interval, as a share of it
    timeout_s: float = 900.0  # then the process is ended and what it had measured is kept

    def __post_init__(self) -> None:
        if self.warmup is not None:
            fields.whole("warmup", self.warmup, 0, 1_000_000)
        if self.samples is not None:
            fields.whole("samples", self.samples, 1, 1_000_000)
        if self.processes is not None:
            fields.whole("processes", self.processes, 1, 1_000)
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
    trace: str = ""  # by which profiler steps are traced once it is timed; '': by none

    def __post_init__(self) -> None:
        fields.text("group", self.group)
        if self.trace:
            fields.one_of("trace", self.trace, PROFILERS)
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
        plain = msgspec.to_builtins(self, order="deterministic")
        work = plain["workload"]
        for recipe in filter(None, (work["recipe"], work["subject"].get("written"))):
            for lever in _LATER:  # trials of before they were levers keep their key
                if recipe[lever] == getattr(_PLAIN, lever):
                    del recipe[lever]
        return hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16]
