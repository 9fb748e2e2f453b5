"""Results that wait: while a module runs, some functions of torch return an object that remembers what was asked of it.

It becomes one fused operation where the code goes on as a known pattern does. Anything else done to it makes the ordinary
tensor, by the same calls in the same order, so that no code can tell the difference.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from flopwise.errors import one_line
from flopwise.patch.checked import FirstStep, Forward, Kind, can_check, forward_of, put_forward
from flopwise.patch.patched import Patched
from flopwise.torch_private import StopRecomputation, saved_tensor_hook


@dataclass(frozen=True)
class Call:
    """One call of a function of torch."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """'mul' for torch.mul, x.mul, x * y and x *= y."""
        name = str(getattr(self.func, "__name__", ""))
        return _PLAIN.get(name, name)

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def in_place(self) -> bool:
        """Whether it writes to its first argument."""
        name = str(getattr(self.func, "__name__", ""))
        return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE

    @property
    def is_attribute(self) -> bool:
        """Of x.shape and its kin."""
        return getattr(self.func, "__name__", "") in ("__get__", "__set__")

    def with_(self, new: Mapping[int, Any]) -> "Call":
        """The call with other objects in place of some of its arguments, which are given by their id."""
        return Call(self.func, _exchanged(self.args, new), {k: _exchanged(v, new) for k, v in self.kwargs.items()})

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = {"matmul": "matmul", "mul": "mul", "truediv": "div", "add": "add", "sub": "sub"}
_PLAIN = {
    form.format(name): plain
    for name, plain in _OPERATORS.items()
    for form in ("__{}__", "__i{}__", "__r{}__", "{}_")
    if not (name in ("truediv", "sub", "matmul") and form == "__r{}__")
}
_IN_PLACE = ("__setitem__", *(f"__i{one}__" for one in _BINARY))
_PLAIN |= {"div_": "div", "true_divide": "div", "multiply": "mul", "masked_fill_": "masked_fill", "bmm": "matmul"}


def _exchanged(value: Any, new: Mapping[int, Any]) -> Any:
    if id(value) in new:
        return new[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_exchanged(one, new) for one in value)
    if isinstance(value, tuple):  # a named one
        return type(value)(*(_exchanged(one, new) for one in value))
    if isinstance(value, dict):
        for key in value:
            value[key] = _exchanged(value[key], new)
    return value


class Deferred(ABC):
    """What a function was asked for and has not computed yet: the calls so far, each with a `STAND_IN` for the one before."""

    known: Mapping[str, Any]  # attributes that need no tensor: shape, device, …

    def __init__(self, calls: tuple[Call, ...]) -> None:
        self.calls, self.with_grad = calls, torch.is_grad_enabled()
        self._made: Tensor | None = None

    def real(self) -> Tensor:
        """The ordinary tensor; from then on this is no more than that tensor."""
        if self._made is None:
            self._made = run_calls(self.calls)
        return self._made

    def goes_on(self) -> bool:
        """Whether it may still be fused: nobody has the tensor yet, and no function with a backward of its own is running."""
        return self._made is None and torch.is_grad_enabled() == self.with_grad

    def joined(self, call: Call) -> tuple[Call, ...]:
        """The calls so far and one more, which takes this as an argument."""
        return *self.calls, call.with_({id(self): STAND_IN})

    @abstractmethod
    def then(self, call: Call) -> "Deferred | Fused | None":
        """What a call with this among its arguments gives: still deferred, or fused; None: compute it as written."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        waiting = [one for one in leaves((args, kwargs or {})) if isinstance(one, Deferred)]
        if call.name in _SHAPES and not kwargs:
            return getattr(torch.empty(waiting[0].known["shape"], device="meta"), call.name)(*args[1:])
        made = waiting[0].then(call) if len(waiting) == 1 and waiting[0].goes_on() else None
        if made is None:
            return call.with_({id(one): one.real() for one in waiting}).run()
        if isinstance(made, Fused):
            return made.run()
        if call.in_place and args[0] is waiting[0]:
            vars(waiting[0]).update(vars(made))  # x *= y: who holds x sees it
            return waiting[0]
        return made

    def __getattr__(self, name: str) -> Any:
        """Methods are called as torch's functions are; other attributes are the tensor's."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self.known:
            return self.known[name]
        method = getattr(Tensor, name)
        if callable(method):
            return lambda *args, **kwargs: handle_torch_function(method, (self,), self, *args, **kwargs)
        return getattr(self.real(), name)


@dataclass(frozen=True)
class Fused:
    """The end of a chain: one operation gives what all its calls would."""

    run: Callable[[], Tensor]


def run_calls(calls: tuple[Call, ...], new: Mapping[int, Any] | None = None) -> Any:
    """Call one after the other, with `new` objects in place of some arguments."""
    result: Any = None
    for call in calls:
        result = call.with_({**(new or {}), id(STAND_IN): result}).run()
    return result


STAND_IN = object()
_SHAPES = ("size", "dim", "numel")


def _operator(name: str) -> Callable[..., Any]:
    def run(self: Deferred, *args: Any) -> Any:
        return handle_torch_function(getattr(Tensor, name), (self,), self, *args)

    return run


# Python looks operators up on the class, where `__getattr__` does not see them.
_UNARY = ("neg", "pos", "abs", "invert", "len", "iter", "bool", "float", "int", "index")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "contains")
for _name in (*_UNARY, *_COMPARED, *_BINARY, *(f"r{one}" for one in _BINARY), *(f"i{one}" for one in _BINARY)):
    if hasattr(Tensor, f"__{_name}__"):
        setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


def leaves(value: Any) -> Iterator[Any]:
    """What lies in tuples, lists and dicts."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def without_deferred(value: Any) -> Any:
    """The same, with everything computed that still waits."""
    waiting = {id(one): one.real() for one in leaves(value) if isinstance(one, Deferred)}
    return _exchanged(value, waiting) if waiting else value


# --- Patterns: which calls are deferred while a module runs.


class Pattern(Protocol):
    """A chain of calls that one operation can do, in the modules of one kind."""

    kind: Kind

    def begin(self, call: Call) -> Deferred | None:
        """What stands for the call's result if the chain may begin with it."""

    def called(self, call: Call, made: Any) -> None:
        """Any other call, and what it made."""

    def running(self, module: nn.Module) -> None:
        """A module's forward begins."""


class _Deferring(TorchFunctionMode):
    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.pattern, self.hook = pattern, saved_tensor_hook()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        if call.is_attribute:
            return call.run()
        if saved_tensor_hook() is not self.hook:  # a checkpoint inside of the module: it would compute again as written
            return call.with_(
                {id(one): one.real() for one in leaves((args, kwargs or {})) if isinstance(one, Deferred)}
            ).run()
        if any(isinstance(one, Deferred) for one in leaves((args, kwargs or {}))):
            return Deferred.__torch_function__(func, types, args, kwargs)
        begun = self.pattern.begin(call)
        if begun is not None:
            return begun
        made = call.run()
        self.pattern.called(call, made)
        return made


def _deferring(original: Forward, pattern: Pattern) -> Forward:
    """A forward in which the pattern runs fused."""
    first = FirstStep()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if pattern.kind.given_up or torch.compiler.is_compiling() or first.goes_on():
            return original(self, *args, **kwargs)
        pattern.running(self)
        try:
            with _Deferring(pattern):
                return without_deferred(original(self, *args, **kwargs))
        except StopRecomputation:
            raise
        except Exception as error:  # noqa: BLE001  code that takes no stand-in for a tensor; its own faults come again
            pattern.kind.give_up(f"its code takes no deferred result ({one_line(str(error), 120)})")
            return original(self, *args, **kwargs)

    return forward


# --- Which modules run a pattern shows in their first call, on real tensors.


@dataclass
class _Chain:
    """Calls that may become the pattern."""

    owner: nn.Module
    complete: bool = False
    spoiled_by: str = ""  # the call that is no part of the pattern


class _Watching(TorchFunctionMode):
    """Runs everything as written, and follows the tensors that the pattern would defer."""

    def __init__(self, pattern_of: Callable[[nn.Module], Pattern]) -> None:
        super().__init__()
        self.pattern_of = pattern_of
        self.running: list[nn.Module] = []  # the innermost last
        self.counted: set[nn.Module] = set()
        self._followed: dict[int, tuple[Tensor, Deferred, _Chain]] = {}  # by the tensor's id
        self._chains: list[_Chain] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        if call.is_attribute or call.name in _SHAPES:
            return call.run()
        found = [self._followed[id(one)] for one in leaves((args, kwargs or {})) if id(one) in self._followed]
        pattern = self.pattern_of(self.running[-1])
        begun = pattern.begin(call) if not found else None
        made = call.run()
        if begun is not None:
            self._follow(made, begun, _Chain(self.running[-1]))
        elif not found:
            pattern.called(call, made)
        for followed in found:
            self._advance(call, made, *followed, alone=len(found) == 1)
        return made

    def _advance(self, call: Call, made: Any, tensor: Tensor, state: Deferred, chain: _Chain, alone: bool) -> None:
        """A call with a tensor that is followed: the chain goes on, or is complete, or spoiled."""
        if chain.spoiled_by:
            return
        following = state.then(call.with_({id(tensor): state})) if alone and state.goes_on() else None
        if isinstance(following, Deferred):
            self._follow(made, following, chain)
        elif following is not None and chain.owner is self.running[-1]:
            chain.complete = True
        else:
            chain.spoiled_by = call.name

    def _follow(self, made: Tensor, state: Deferred, chain: _Chain) -> None:
        self._followed[id(made)] = made, state, chain
        if chain not in self._chains:
            self._chains.append(chain)

    def chains(self, module: nn.Module, output: Any) -> list[_Chain]:
        """The chains of a module that has now run; its tensors are let go."""
        for one in leaves(list(vars(module).values())):
            if id(one) in self._followed:
                self._followed[id(one)][2].spoiled_by = "keep"
        for one in leaves(output):
            chain = self._followed[id(one)][2] if id(one) in self._followed else None
            if chain is not None and not chain.complete and self.running:
                chain.owner = self.running[-1]  # who called the module goes on with it
            elif chain is not None:
                chain.spoiled_by = "keep"
        own = [chain for chain in self._chains if chain.owner is module]
        self._chains = [chain for chain in self._chains if chain.owner is not module]
        self._followed = {key: one for key, one in self._followed.items() if one[2].owner is not module}
        return own


def watch_first_calls(
    modules: Iterable[nn.Module], pattern_of: Callable[[nn.Module], Pattern], patched: Patched
) -> int:
    """Fuse the pattern in those modules whose first call completes it; how many are watched for that."""
    watching = _Watching(pattern_of)
    watched = list(modules)
    for module in watched:
        put_forward(module, _watched(forward_of(module), watching, patched), patched)
    return len(watched)


def _watched(original: Forward, watching: _Watching, patched: Patched) -> Forward:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not can_check():
            return original(self, *args, **kwargs)
        pattern, outermost = watching.pattern_of(self), not watching.running
        pattern.running(self)
        watching.running.append(self)
        try:
            with watching if outermost else nullcontext():
                output = original(self, *args, **kwargs)
        finally:
            watching.running.pop()
        chains = watching.chains(self, output)
        complete = [chain for chain in chains if chain.complete and not chain.spoiled_by]
        self.forward = MethodType(_deferring(original, pattern) if complete else original, self)
        if complete and not pattern.kind.given_up:
            if self not in watching.counted:  # a module may be called more than once to be compared
                pattern.kind.count()
                watching.counted.add(self)
        elif chains and not pattern.kind.given_up:
            _refuse(pattern.kind, chains[0].spoiled_by, patched)
        return output

    return forward


def _refuse(kind: Kind, spoiled_by: str, patched: Patched) -> None:
    why = (
        f"{spoiled_by} is done to what would be fused"
        if spoiled_by != "keep"
        else "returns or keeps what would be fused"
    )
    line = f"{kind.lever}: {kind.name}: {why}"
    if spoiled_by and line not in patched.refused:
        patched.refused.append(line)
