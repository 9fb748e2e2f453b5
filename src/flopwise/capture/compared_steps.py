"""What the first steps of a run computed: their losses, some values of every weight's gradient, and how weights changed."""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flopwise.capture.step import GRAPH_WARMUPS, Step
from flopwise.lm.layers import JoinedLinear
from flopwise.records.run import GRADIENT, UPDATE

STEPS = GRAPH_WARMUPS + 3  # of a captured step: those that warmed it up, and some replays
GRADIENT_STEPS = (1, 2)  # a CUDA graph's replays show none: hooks do not run in them
UPDATE_STEPS = (1, 2, GRAPH_WARMUPS + 1)
MAX_VALUES = 1 << 14  # of one weight, evenly spread

Values = dict[str, npt.NDArray[np.float64]]  # by weight
Quantity = tuple[str, int]  # a kind of values, and the step


class FollowedSteps(NamedTuple):
    """What some steps computed."""

    losses: dict[int, float]  # by step, where it shows one
    values: dict[Quantity, Values]
    weights: Values  # before the first step
    sizes: dict[str, int]  # how many values each weight has
    drawn: tuple[str, str] = (
        "",
        "",
    )  # what the random generators were set to before the first step, and what they were after it

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return self.drawn[0] != self.drawn[1]

    @property
    def empty(self) -> bool:
        return not self.losses and not any(self.values.values())

    def problem(self) -> str:
        """Why nothing can be compared with them; '' if something can.

        >>> FollowedSteps({1: 2.0, 2: math.nan}, {}, {}, {}).problem(), FollowedSteps({1: 2.0}, {}, {}, {}).problem()
        ('the loss is not finite', '')
        """
        if self.empty:
            return "shows neither a loss nor gradients"
        if not all(math.isfinite(loss) for loss in self.losses.values()):
            return "the loss is not finite"
        for (kind, _), values in self.values.items():
            if bad := next((name for name, one in values.items() if not np.isfinite(one).all()), ""):
                return f"the {kind} of {bad} is not finite"
        return ""


class StepFollower:
    """Follows a step from its first run on. Random generators are set before every step, so that two runs draw alike."""

    def __init__(
        self, steps: int = STEPS, *, seed: int = 0, change: Callable[[nn.Module], None] = lambda model: None
    ) -> None:
        """`seed`: another one draws other numbers. `change`: what is done to the model before its first step."""
        self.steps, self.seed, self.change = steps, seed, change
        self.followed = FollowedSteps({}, {}, {}, {})
        self._step: Step | None = None
        self._done = 0
        self._hooks: list[Any] = []
        self._gradients: dict[str, Tensor] | None = None  # None: they are not looked at
        self._before: dict[str, Tensor] = {}

    def begin(self, step: Step) -> None:
        """Before its first run; once it is captured, again with what replays it."""
        first, self._step = self._step is None, step
        if not first or step.trained is None:
            return
        self.change(step.trained)
        self._before = self._weights()
        self.followed.weights.update({name: _numbers(one) for name, one in self._before.items()})
        for name, weight, rows in named_weights(step.trained):
            self.followed.sizes[name] = _rows(weight, rows).numel()
            if weight.requires_grad:
                self._hooks.append(weight.register_hook(self._watch(name, rows)))

    @property
    def more(self) -> bool:
        return self._done < self.steps

    def once(self, run: Callable[[], object]) -> None:
        """Run the step once, and write down what it computed."""
        assert self._step is not None
        number = self._done + 1
        seed_everything(1000 * (self.seed + 1) + number)
        states = random_states()
        scale = self._step.loss_scale() if number in GRADIENT_STEPS else 1.0
        self._gradients = {} if number in GRADIENT_STEPS else None
        run()
        self._done = number
        if number == 1:
            self.followed = self.followed._replace(drawn=(states, random_states()))
        if (loss := self._step.loss()) is not None:
            self.followed.losses[number] = float(loss)
        if self._gradients:
            seen = {name: _numbers(one / scale) for name, one in self._gradients.items()}
            if scale == 1.0 or all(np.isfinite(one).all() for one in seen.values()):  # a scaler skips such a step
                self.followed.values[GRADIENT, number] = seen
        self._gradients = None
        self._follow_weights(number)

    def end(self) -> FollowedSteps:
        """What it saw; the step is as it was."""
        while self._hooks:
            self._hooks.pop().remove()
        self._before = {}
        return self.followed

    def _watch(self, name: str, rows: slice) -> Callable[[Tensor], None]:
        """Each backward pass adds to what it sees; in a graph that is being captured, it does nothing."""

        def hook(gradient: Tensor) -> None:
            if self._gradients is not None:
                seen = sample(_rows(gradient.to_dense() if gradient.is_sparse else gradient, rows))
                before = self._gradients.get(name)
                self._gradients[name] = seen if before is None else before + seen

        return hook

    def _follow_weights(self, number: int) -> None:
        if not self._before:
            return
        if number in UPDATE_STEPS or number + 1 in UPDATE_STEPS:
            now = self._weights()
            if number in UPDATE_STEPS:
                changed = {
                    name: _numbers(one - self._before[name]) for name, one in now.items() if name in self._before
                }
                self.followed.values[UPDATE, number] = changed
            self._before = now

    def _weights(self) -> dict[str, Tensor]:
        assert self._step is not None
        model, exact = self._step.trained, self._step.exact_weight
        if model is None:
            return {}
        return {name: sample(_rows(exact(weight), rows)) for name, weight, rows in named_weights(model)}


def follow_steps(step: Step, follower: StepFollower, once: Callable[[], object] | None = None) -> FollowedSteps:
    """Run a step that the follower has begun with until it has seen enough."""

    def run() -> None:
        for phase in step.phases.values():
            phase()

    try:
        while follower.more:
            follower.once(once or run)
    finally:
        found = follower.end()
    return found


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, slice]]:
    """Every weight and which rows of it; projections joined into one matmul have the names they have when separate."""
    joined = {name: module for name, module in model.named_modules() if isinstance(module, JoinedLinear)}
    for name, weight in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner not in joined:
            yield name, weight, slice(None)
            continue
        begin = 0
        for separate, out in zip(joined[owner].names, joined[owner].outs, strict=True):
            yield ".".join(filter(None, (owner.rpartition(".")[0], separate, kind))), weight, slice(begin, begin + out)
            begin += out


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if rows == slice(None) else tensor[rows]  # one number has none


def sample(tensor: Tensor) -> Tensor:
    """Up to MAX_VALUES of its values. The stride is odd, so that it meets every column of a matrix.

    >>> sample(torch.arange(4.0)).tolist(), len(sample(torch.zeros(1024, 1024)))
    ([0.0, 1.0, 2.0, 3.0], 16132)
    """
    flat = tensor.detach().reshape(-1)
    stride = math.ceil(flat.numel() / MAX_VALUES)
    return flat[:: max(1, stride | 1 if stride > 1 else 1)].double().clone()


def _numbers(values: Tensor) -> npt.NDArray[np.float64]:
    return np.asarray(values.cpu().numpy(), dtype=np.float64)


def seed_everything(seed: int) -> None:
    """Set every global generator that a step may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> str:
    """The states of those generators, in short."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    others = (repr(random.getstate()), repr(np.random.get_state(legacy=False)["state"]))
    return hashlib.sha256(b"".join([*states, *(one.encode() for one in others)])).hexdigest()
