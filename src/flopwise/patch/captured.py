"""A training step of a user's own loop as one CUDA graph: it is called as before, with new data each time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flopwise.errors import one_line
from flopwise.patch.patched import Patched

WARMUPS = 3  # calls on a side stream before the capture: lazy initialisation must not be captured


class CapturedStep:
    """`step(*tensors)`: the first calls run as they are, then one is captured, and later ones copy their data in and replay it.

    A call with other shapes, dtypes or values runs as it is. Learning rates are read anew at every replay.
    """

    def __init__(self, step: Callable[..., Any], optimizers: Sequence[Optimizer], patched: Patched) -> None:
        self.step, self.optimizers, self.patched = step, optimizers, patched
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: tuple[Any, ...] = ()
        self._inputs: list[Tensor] = []
        self._result: Any = None
        self._rates: list[Tensor] = []
        self._off = not torch.cuda.is_available()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._off:
            return self.step(*args, **kwargs)
        self._calls += 1
        if self._calls <= WARMUPS:
            return self._warm_up(args, kwargs)
        if self._graph is None and not self._capture(args, kwargs):
            return self.step(*args, **kwargs)
        if _key(args, kwargs) != self._key:
            return self.step(*args, **kwargs)
        for static, given in zip(self._inputs, _tensors((args, kwargs)), strict=True):
            static.copy_(given)
        self._set_rates()
        assert self._graph is not None
        self._graph.replay()
        return _copied(self._result)

    def _warm_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._calls == 1:
            self._hold_rates()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self.step(*args, **kwargs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return result

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        own_args, own_kwargs = _held((args, kwargs))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self.step(*own_args, **own_kwargs)
        except RuntimeError as error:
            self._off = True
            first: BaseException = error
            while first.__context__ is not None:
                first = first.__context__
            self.patched.refused.append(f"graph: the step cannot be captured: {one_line(str(first), 160)}")
            return False
        self._graph, self._key = graph, _key(args, kwargs)
        self._inputs = list(_tensors((own_args, own_kwargs)))
        self.patched.done.append("graph: the step is replayed as one CUDA graph")
        return True

    def _hold_rates(self) -> None:
        """Learning rates as tensors, which a replay reads; a scheduler fills them."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if "capturable" in group or isinstance(group["lr"], Tensor):
                    device = group["params"][0].device
                    self._rates.append(torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone())
                    group["lr"] = self._rates[-1]

    def _set_rates(self) -> None:
        """A loop that sets `group["lr"]` itself means the tensor that the graph reads."""
        groups = [g for optimizer in self.optimizers for g in optimizer.param_groups]
        kept = iter(self._rates)
        for group in groups:
            if "capturable" not in group and not isinstance(group["lr"], Tensor):
                continue
            rate = next(kept)
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _key(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What must be the same for a replay to do the same work: shapes and dtypes of tensors, and all else by its value."""

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            return tuple((name, of(one)) for name, one in value.items())
        return tuple(of(one) for one in value) if isinstance(value, list | tuple) else value

    return of((args, kwargs))  # type: ignore[no-any-return]


def _held(value: Any) -> Any:
    """The same arguments with tensors of the graph's own, on the GPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cuda", copy=True)
    if isinstance(value, dict):
        return {name: _held(one) for name, one in value.items()}
    return type(value)(_held(one) for one in value) if type(value) in (list, tuple) else value


def _copied(value: Any) -> Any:
    """A result that the next replay does not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return type(value)(_copied(one) for one in value) if type(value) in (list, tuple) else value
