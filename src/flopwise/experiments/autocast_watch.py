"""Watches a step from above autocast: which operations were called with what, and what dtype came out of every module. [torch]"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flopwise.experiments.experiment import Row
from flopwise.spec.dtypes import dtype_name

LOWERED, KEPT, FOLLOWS, OWN, UNKNOWN = (
    "lowered", "kept in fp32", "follows its inputs", "cast by its own code", "not found out",
)  # fmt: skip
MIX = "fp32 and half"

_FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_CASTS = {"to", "float", "half", "bfloat16", "type", "type_as"}
_SAME_NUMBERS = {"contiguous", "reshape", "flatten", "unflatten", "clone"}  # they copy at most
_NAMES = {"rmul": "mul", "radd": "add", "rsub": "sub", "truediv": "div", "rtruediv": "div", "rpow": "pow"}
_MADE_BY = "_flopwise_made_by"  # what a tensor remembers of its call


class Watch(TorchFunctionMode):
    """While open, `modules` and the calls under autocast fill up; a call is seen once, whatever it calls itself."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.modules: list[Row] = []
        self._model, self._half = model, _FLOATS[precision]
        self._inside: list[Row] = []
        self._calls: Counter[tuple[str, str, str, str]] = Counter()
        self._treatments: dict[str, str] = {}
        self._hooks = ExitStack()

    def calls(self) -> list[Row]:
        """Each kind of call and how often it was made."""
        return [
            {"op": op, "given": given, "dtype": dtype, "treatment": treatment, "count": count}
            for (op, given, dtype, treatment), count in self._calls.items()
        ]

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
            row: Row = {"module": path, "kind": type(module).__name__, "dtype": "", "gradient_dtype": ""}
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
            self._tell(name, func, args, kwargs, inputs, result)
        return result

    def _tell(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], result: Any
    ) -> None:
        given = {dtype_name(one.dtype) for one in inputs}
        word = given.pop() if len(given) == 1 else MIX
        if name in _CASTS or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
            treatment = OWN
        else:
            if name not in self._treatments:
                self._treatments[name] = self._asked(name, func, args, kwargs)
            treatment = self._treatments[name]
        for made in _floats(result):
            setattr(made, _MADE_BY, {"op": name, "given": word, "treatment": treatment})
        self._calls[name, word, dtype_name(next(_floats(result)).dtype), treatment] += 1

    def _asked(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What autocast does to this operation: the same call on copies, all of them half, then all of them fp32."""
        if name.endswith("_") or "out" in kwargs:
            return UNKNOWN
        found = []
        for dtype in (self._half, torch.float32):
            try:
                with torch.no_grad():
                    copied = [_cast(one, dtype) for one in args]
                    made = next(_floats(func(*copied, **{k: _cast(v, dtype) for k, v in kwargs.items()})), None)
            except (RuntimeError, TypeError, ValueError):
                return UNKNOWN
            found.append(None if made is None else made.dtype)
        outcomes = {
            (torch.float32, torch.float32): KEPT,
            (self._half, self._half): LOWERED,
            (self._half, torch.float32): FOLLOWS,
        }
        return outcomes.get(tuple(found), UNKNOWN)  # type: ignore[arg-type]


def op_name(func: Any) -> str:
    """What an operation is called, however it was written.

    >>> op_name(torch.Tensor.__rmul__), op_name(torch.nn.functional.layer_norm), op_name(torch.Tensor.add_)
    ('mul', 'layer_norm', 'add_')
    """
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    bare = name.strip("_") if name.startswith("__") else name
    return _NAMES.get(bare, bare)


def _origin(name: str, made: Tensor, inputs: Sequence[Tensor]) -> Tensor | None:
    """The input whose numbers these are, for a view or a copy."""
    if name in _SAME_NUMBERS:
        return inputs[0]
    place = made.untyped_storage()._cdata  # of a fake tensor, too
    return next((one for one in inputs if one.untyped_storage()._cdata == place and one.dtype == made.dtype), None)


def _floats(found: Any) -> Iterator[Tensor]:
    """The floating-point tensors in arguments or results."""
    if isinstance(found, Tensor):
        if found.dtype in _FLOATS.values():
            yield found
    elif isinstance(found, Mapping):
        for one in found.values():
            yield from _floats(one)
    elif isinstance(found, tuple | list):
        for one in found:
            yield from _floats(one)


def _cast(found: Any, dtype: torch.dtype) -> Any:
    if isinstance(found, Tensor):
        return found.detach().to(dtype, copy=True) if found.dtype in _FLOATS.values() else found
    if isinstance(found, list) or type(found) is tuple:
        return type(found)(_cast(one, dtype) for one in found)
    return found
