"""Runs one step under autocast and watches it: which operations were called with what, what dtype every module gave. [torch]

Every call of a torch function is watched from above autocast: the dtypes that go in are the caller's, the dtype that comes out is
what autocast made of it. What autocast does to an operation is not read from a list but determined by asking: the same call once
more with all of its numbers in half precision and once with all of them in fp32.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flopwise.capture.applied_levers import NOT_AUTOCAST
from flopwise.capture.build import build_step
from flopwise.capture.step import Step
from flopwise.errors import Unsupported
from flopwise.experiments.autocast_rows import (
    CUDA_RULES,
    FOLLOWS,
    KEPT,
    LOWERED,
    MIX,
    OWN,
    UNKNOWN,
    Call,
    Module,
    Whole,
)
from flopwise.lm.precision import autocast
from flopwise.predict.dry.cuda_autocast import cuda_autocast
from flopwise.predict.dry.fake_step import tolerant_modules
from flopwise.records.run import Ran
from flopwise.spec.dtypes import dtype_name
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload
from flopwise.torch_private import FakeTensorMode, storage_key

TOKENS = 64  # the longest context that is run: dtypes do not depend on it, nor on the batch

_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_CASTS = {"to", "float", "half", "bfloat16", "type", "type_as"}
_SAME_NUMBERS = {"contiguous", "reshape", "flatten", "unflatten", "clone"}  # they copy at most
_NAMES = {"rmul": "mul", "radd": "add", "rsub": "sub", "truediv": "div", "rtruediv": "div", "rpow": "pow"}
_MADE_BY = "_flopwise_made_by"  # the attribute in which a tensor keeps the call that made it


def audit(chosen: Workload | None, device: torch.device, about: Mapping[str, str]) -> Iterator[Whole | Module | Call]:
    """The rows of one step under autocast, `about` being their model, rules and precision; without a workload of the course's
    small model. Raises `Unsupported` where the step cannot run so."""
    precision = about["precision"]
    with ExitStack() as stack:
        if about["rules"] == CUDA_RULES:
            stack.enter_context(cuda_autocast())
        if chosen and isinstance(chosen.subject, ModelSpec) and device.type == "cpu":
            # Half-precision products can take a CPU minutes: fake tensors have dtypes and no numbers.
            stack.enter_context(tolerant_modules())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        step = _toy(precision, device) if chosen is None else _step(chosen, precision, device)
        yield from _watched(step, about)


def _watched(step: Step, about: Mapping[str, str]) -> Iterator[Whole | Module | Call]:
    assert step.model is not None
    watch = Watch(step.model, about["precision"])
    with watch:
        for phase in step.phases.values():
            phase()
    parameters, loss = list(step.model.parameters()), step.loss()
    gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    losses: list[Tensor] = [] if loss is None else [loss]
    for what, some in (("parameters", parameters), ("gradients", gradients), ("loss", losses)):
        for dtype, same in groupby(sorted(some, key=lambda t: str(t.dtype)), key=lambda t: t.dtype):
            sizes = [t.nbytes for t in same]
            yield Whole(what=what, dtype=dtype_name(dtype), tensors=len(sizes), held_bytes=sum(sizes), **about)
    yield from (Module(**seen, **about) for seen in watch.modules)
    for (op, given, dtype, treatment), count in watch.calls.items():
        yield Call(op=op, given=given, dtype=dtype, treatment=treatment, count=count, **about)


def _step(chosen: Workload, precision: str, device: torch.device) -> Step:
    """Eager; of a model of ours without an optimizer, and of few tokens. A step of the user's own runs as it is, and autocast
    around it: dtypes need no loss scaler, as training in fp16 would."""
    ours = isinstance(chosen.subject, ModelSpec)
    recipe = msgspec.structs.replace(chosen.recipe, compile="off", graph="off", checkpoint=0)
    if ours:
        few = {"batch": 1, "context": min(TOKENS, chosen.context), "phase": "backward"}
        recipe = msgspec.structs.replace(recipe, precision=precision)
        return build_step(msgspec.structs.replace(chosen, recipe=recipe, **few), device)
    recipe = msgspec.structs.replace(recipe, precision="fp32")
    step = _in_autocast(build_step(msgspec.structs.replace(chosen, recipe=recipe), device), precision, device)
    if step.model is None:
        raise Unsupported(f"{chosen.target} shows no model whose modules could be watched", "build it in the factory")
    return step


def _in_autocast(step: Step, precision: str, device: torch.device) -> Step:
    def around(run: Callable[[], object]) -> object:
        with autocast(Recipe(precision=precision), device.type):
            return run()

    phases = {name: run if name in NOT_AUTOCAST else partial(around, run) for name, run in step.phases.items()}
    return replace(step, phases=phases)


def _toy(precision: str, device: torch.device) -> Step:
    """The course's small model: linear, ReLU, layer norm, linear; and a cross entropy."""
    torch.manual_seed(0)
    model = nn.Sequential()
    layers = (nn.Linear(8, 10, bias=False), nn.ReLU(), nn.LayerNorm(10), nn.Linear(10, 8, bias=False))
    for name, layer in zip(("fc1", "relu", "ln", "fc2"), layers, strict=True):
        model.add_module(name, layer)
    model.to(device)
    x, target = torch.randn(16, 8, device=device), torch.randint(8, (16,), device=device)
    made: list[Tensor] = []

    def forward() -> None:
        with autocast(Recipe(precision=precision), device.type):
            made[:] = [nn.functional.cross_entropy(model(x), target)]

    phases: dict[str, Callable[[], object]] = {"forward": forward, "backward": lambda: made[0].backward()}
    ran = Ran(device=str(device))
    return Step(phases=phases, ran=lambda: ran, model=model, trained=model, loss=lambda: made[0])


class Watch(TorchFunctionMode):
    """While open, `modules` and the `calls` under autocast fill up; a call is seen once, whatever it calls itself."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.modules: list[dict[str, str]] = []
        self.calls: Counter[tuple[str, str, str, str]] = Counter()  # operation, dtypes given, dtype, treatment
        self._model, self._half = model, _FLOATS[precision]
        self._inside: list[dict[str, str]] = []
        self._treatments: dict[str, str] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        for path, module in self._model.named_modules():
            begin, end = self._hooks_of(path)
            for handle in (module.register_forward_pre_hook(begin), module.register_forward_hook(end)):
                self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hooks.close()

    # --- modules

    def _hooks_of(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(module: nn.Module, _: Any) -> None:
            row = {"module": path, "kind": type(module).__name__, "dtype": "", "gradient_dtype": ""}
            self.modules.append(row)
            self._inside.append(row)

        def end(module: nn.Module, _: Any, output: Any) -> None:
            row = self._inside.pop()
            made = next(_floats(output), None)
            if made is None:
                self.modules.remove(row)
                return
            row["dtype"] = dtype_name(made.dtype)
            row.update(getattr(made, _MADE_BY, {"op": "", "given": "", "treatment": UNKNOWN}))
            if made.requires_grad:
                made.register_hook(lambda gradient: row.update(gradient_dtype=dtype_name(gradient.dtype)))

        return begin, end

    # --- calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        inputs, made = list(_floats((args, kwargs))), next(_floats(result), None)
        watched = self._inside or torch.is_grad_enabled()  # an optimizer's update is neither
        if made is None or not inputs or not watched or any(made is one for one in inputs):
            return result
        name = op_name(func)
        origin = _origin(name, made, inputs)
        if origin is not None:
            if hasattr(origin, _MADE_BY):
                setattr(made, _MADE_BY, getattr(origin, _MADE_BY))
        elif torch.is_autocast_enabled(made.device.type):
            self._count(name, func, args, kwargs, inputs, result)
        return result

    def _count(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], result: Any
    ) -> None:
        dtypes = {dtype_name(one.dtype) for one in inputs}
        given = dtypes.pop() if len(dtypes) == 1 else MIX
        if name in _CASTS or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
            treatment = OWN
        else:
            if name not in self._treatments:
                self._treatments[name] = self._ask(name, func, args, kwargs)
            treatment = self._treatments[name]
        for made in _floats(result):
            setattr(made, _MADE_BY, {"op": name, "given": given, "treatment": treatment})
        self.calls[name, given, dtype_name(next(_floats(result)).dtype), treatment] += 1

    def _ask(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What autocast does to this operation: the same call on copies, all of them half, then all of them fp32."""
        if name.endswith("_") or "out" in kwargs:
            return UNKNOWN
        dtypes = []
        for dtype in (self._half, torch.float32):
            try:
                with torch.no_grad():
                    copied = [_cast(one, dtype) for one in args]
                    made = next(_floats(func(*copied, **{k: _cast(v, dtype) for k, v in kwargs.items()})), None)
            except (RuntimeError, TypeError, ValueError):
                return UNKNOWN
            dtypes.append(None if made is None else made.dtype)
        outcomes = {(torch.float32, torch.float32): KEPT, (self._half, self._half): LOWERED}
        outcomes[self._half, torch.float32] = FOLLOWS
        return outcomes.get(tuple(dtypes), UNKNOWN)  # type: ignore[arg-type]


def op_name(func: Any) -> str:
    """What an operation is called, however it was written.

    >>> op_name(torch.Tensor.__rmul__), op_name(torch.nn.functional.layer_norm), op_name(torch.Tensor.add_)
    ('mul', 'layer_norm', 'add_')
    """
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    bare = name.strip("_") if name.startswith("__") else name
    return _NAMES.get(bare, bare)


def _origin(name: str, made: Tensor, inputs: Sequence[Tensor]) -> Tensor | None:
    """The input that a view or a copy has its numbers from."""
    if name in _SAME_NUMBERS:
        return inputs[0]
    place = storage_key(made)  # fake tensors have it, too
    return next((one for one in inputs if storage_key(one) == place and one.dtype == made.dtype), None)


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in arguments or results."""
    if isinstance(value, Tensor):
        if value.dtype in _FLOATS.values():
            yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _floats(one)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype, copy=True) if value.dtype in _FLOATS.values() else value
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_cast(one, dtype) for one in value)
    return value
