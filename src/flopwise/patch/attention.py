"""Attention written out, softmax(q kᵀ · scale + mask) v, run as `F.scaled_dot_product_attention`.

The scores are deferred (`deferred.py`): scaling, masks, softmax, dropout and casts are remembered until the product with v.
A causal mask becomes `is_causal`, for which the fast kernels are. That a mask is causal shows in its values, which are looked
at once: later calls know it by its origin, a buffer or calls of torch with the same numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from flopwise.kernels.dispatch import autocast_dtype
from flopwise.patch.attention_setting import runs_sdpa, switch_to_sdpa
from flopwise.patch.checked import Kind
from flopwise.patch.deferred import STAND_IN, Call, Deferred, Fused, Pattern, leaves, run_calls, watch_first_calls
from flopwise.patch.einsum import Layout, finish_layout, start_layout
from flopwise.patch.functions import modules_that_use
from flopwise.patch.origins import Origins
from flopwise.patch.patched import Patched
from flopwise.patch.sdpa_plan import CASTS, Plan, State, advance


def replace(model: nn.Module, value: str, patched: Patched) -> int:
    """Run attention by SDPA. How many modules were switched to it, or write it out: their first call decides."""
    switched, under = switch_to_sdpa(model, patched)
    modules = [one for one in modules_that_use(model, "softmax", (nn.Softmax,)) if one not in under]
    patterns: dict[type, Pattern] = {}

    def pattern_of(module: nn.Module) -> Pattern:
        if type(module) not in patterns:
            patterns[type(module)] = WrittenOut(Kind("attention", type(module).__name__, "run SDPA", patched))
        return patterns[type(module)]

    found = switched + watch_first_calls(modules, pattern_of, patched)
    if not found:
        patched.refused += [f"attention: {name}: calls SDPA as it is" for name in _sdpa_users(model)]
    return found


def _sdpa_users(model: nn.Module) -> list[str]:
    own = modules_that_use(model, "scaled_dot_product_attention", (nn.MultiheadAttention,))
    own += [one for one in model.modules() if runs_sdpa(one)]
    return list(dict.fromkeys(type(one).__name__ for one in own))


class WrittenOut:
    """Attention in the modules of one class."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.origins = kind, Origins()

    def running(self, module: nn.Module) -> None:
        self.origins.start(module)

    def called(self, call: Call, made: Any) -> None:
        self.origins.called(call, made)

    def begin(self, call: Call) -> "Scores | None":
        layout = start_layout(call)
        if layout is None:
            return None
        q, k = layout.tensors
        lead = tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]))
        return Scores(self, (call,), State(q, k, lead, lead, autocast_dtype(q) or q.dtype))


class Scores(Deferred):
    """q kᵀ and what was done to it: scores before the softmax, weights after it."""

    def __init__(self, pattern: WrittenOut, calls: tuple[Call, ...], state: State) -> None:
        super().__init__(calls)
        self.pattern, self.state = pattern, state
        self.known = {"shape": torch.Size(state.shape), "ndim": len(state.shape), "device": state.q.device}
        if state.dtype is not None:
            self.known |= {"dtype": state.dtype}

    def then(self, call: Call) -> "Scores | Fused | None":
        if self.state.soft:
            layout = finish_layout(call, self, self.state.lead)
            if layout is not None:
                return self._product(call, layout)
        state = advance(self.state, call, self)
        return None if state is None else Scores(self.pattern, self.joined(call), state)

    def _product(self, call: Call, layout: Layout) -> Fused | None:
        """The product with v: fused if SDPA can do all of it, and was found to agree."""
        state, (v,) = self.state, layout.tensors
        plan = Plan.of(state, self.pattern.origins)
        if plan is None:
            return None
        sort = plan.sort(state, v), torch.is_grad_enabled(), autocast_dtype(v)
        learned = [mask.tensor for mask in state.masks if mask.tensor.requires_grad]
        given = leaves((self.calls[0].args, call.args, learned))
        tensors = list({id(one): one for one in given if isinstance(one, Tensor)}.values())
        calls = tuple(one for one in self.joined(call) if one.name != "dropout")

        def as_written(*new: Tensor) -> Any:
            return run_calls(calls, _by_id(tensors, new))

        def precise(*new: Tensor) -> Any:
            return run_calls(tuple(_uncast(one) for one in calls if one.name not in CASTS), _by_id(tensors, new))

        def fused(*new: Tensor) -> Any:
            scores: Any = self.pattern.begin(calls[0].with_(_by_id(tensors, new)))
            for one in calls[1:-1]:
                scores = scores.then(one.with_({**_by_id(tensors, new), id(STAND_IN): scores}))
            end = finish_layout(calls[-1].with_({**_by_id(tensors, new), id(STAND_IN): scores}), scores, state.lead)
            return end.arranged(plan.run(scores.state, *end.tensors)) if end is not None else None

        if not self.pattern.kind.allows(sort, as_written, fused, tensors, precise):
            return None
        return Fused(lambda: layout.arranged(plan.run(state, v)))


def _by_id(old: list[Tensor], new: tuple[Tensor, ...]) -> dict[int, Tensor]:
    return {id(one): other for one, other in zip(old, new, strict=True)}


def _uncast(call: Call) -> Call:
    """A softmax in the dtype of its argument."""
    return Call(call.func, call.args, {name: one for name, one in call.kwargs.items() if name != "dtype"})
