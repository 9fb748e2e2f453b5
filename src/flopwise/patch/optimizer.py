"""Another form of the optimizer that a step already has: the object, its groups, its learning rates and its state stay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.lm.own_kernels import needs_triton
from flopwise.patch.patched import Patched

_FUSABLE = (Adam, AdamW, SGD)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Above it, a second moment in bf16 loses less in a step than half of its last place: it would never decay.
LARGEST_BETA2 = 0.99


def check_fusable(optimizers: Sequence[Optimizer]) -> None:
    """Refuse what torch has no fused form of."""
    unknown = [type(optimizer).__name__ for optimizer in optimizers if type(optimizer) not in _FUSABLE]
    if unknown:
        raise Unsupported(f"optimizer = 'fused' does not know {unknown[0]}", "it knows torch's Adam, AdamW and SGD")


def fuse_optimizer(optimizer: Optimizer, patched: Patched | None = None) -> None:
    """Make torch's Adam, AdamW or SGD what it is when built with fused=True; its rates and its state stay."""
    patched = patched or Patched()
    for group in (optimizer.defaults, *optimizer.param_groups):
        if group.get("differentiable"):
            raise Unsupported("optimizer = 'fused' cannot be differentiable", "build it without differentiable=True")
        _put(group, patched, fused=True, foreach=False)
    patched.set(optimizer, torch_private.SCALES_GRADIENTS, True)
    count_on_device(optimizer)


def make_capturable(optimizer: Optimizer, patched: Patched | None = None) -> None:
    """What a CUDA graph needs of an optimizer: its step count on the device, where it has one."""
    for group in (optimizer.defaults, *optimizer.param_groups):
        if "capturable" in group:
            _put(group, patched or Patched(), capturable=True)
    count_on_device(optimizer)


def count_on_device(optimizer: Optimizer) -> None:
    """Move the step counts of an optimizer that has already made steps."""
    for parameter, state in optimizer.state.items():
        if "step" in state and isinstance(parameter, Tensor):
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


def _put(group: dict[str, Any], patched: Patched, **options: Any) -> None:
    before = {name: group.get(name) for name in options}
    group.update(options)
    patched.on_undo(lambda: group.update(before))


class OwnUpdate:
    """Our AdamW in the place of torch's: it works on the same groups and the same state, and a checkpoint looks as before.

    `narrow`: moments in bf16; `master`: bf16 weights whose fp32 rest is kept in the state.
    """

    def __init__(self, optimizer: Optimizer, patched: Patched, *, narrow: bool = False, master: bool = False) -> None:
        asked = "optimizer = 'flopwise-bf16'" if narrow else "optimizer = 'flopwise'"
        check_adamw(optimizer, asked, narrow)
        with needs_triton(asked):
            from flopwise.kernels.adamw import AdamW as OwnAdamW
        self.optimizer, self.narrow, self.master, self._patched = optimizer, narrow, master, patched
        state_dtype = torch.bfloat16 if narrow else torch.float32
        self._make: Callable[[Any], Any] = lambda params: OwnAdamW(params, state_dtype=state_dtype, master=master)
        self.own = self._make([nn.Parameter(torch.zeros(1))])
        self._share()
        torch_private.share_step_hooks(optimizer, self.own)
        self._take_state()
        patched.set(optimizer, "step", torch_private.in_place_of_step(self.step, optimizer))
        patched.set(optimizer, torch_private.SCALES_GRADIENTS, True)
        hooks = [
            optimizer.register_state_dict_post_hook(self._plain_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._keep_rests),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]
        patched.on_undo(self._give_back)
        for hook in hooks:
            patched.on_undo(hook.remove)
        self._rests: dict[Any, Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update by our kernel."""
        for name in ("grad_scale", "found_inf"):
            setattr(self.own, name, getattr(self.optimizer, name, None))
        self._patched.updates += 1
        return self.own.step(closure)

    def part(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Our optimizer of some of the parameters, with the options that their groups have at each step."""
        wanted = {id(p) for p in parameters}
        pairs = [
            (group, chosen)
            for group in self.optimizer.param_groups
            if (chosen := [p for p in group["params"] if id(p) in wanted])
        ]
        part = self._make([{"params": chosen} for _, chosen in pairs])
        part.state = self.optimizer.state
        own_step = part.step

        def step(closure: Any = None) -> Any:
            for (group, chosen), mine in zip(pairs, part.param_groups, strict=True):
                mine.update({name: value for name, value in group.items() if name != "params"}, params=chosen)
            self._patched.updates += 1
            return own_step(closure)

        part.step = step
        return part  # type: ignore[no-any-return]

    def _share(self) -> None:
        self.own.param_groups, self.own.state = self.optimizer.param_groups, self.optimizer.state

    def _take_state(self) -> None:
        """Counts on the device, moments in the dtype in which they are kept."""
        count_on_device(self.optimizer)
        dtype = torch.bfloat16 if self.narrow else torch.float32
        for state in self.optimizer.state.values():
            for name in _MOMENTS:
                if name in state:
                    state[name] = state[name].to(dtype)

    def _plain_state_dict(self, _: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """As torch's own AdamW would have saved it: counts on the host, moments in fp32, the rests with the weights."""
        from flopwise.kernels.adamw_kernels import LOW

        plain = {}
        for number, state in saved["state"].items():
            plain[number] = {name: value for name, value in state.items() if name != LOW}
            if "step" in state:
                plain[number]["step"] = state["step"].detach().to("cpu", copy=True)
            plain[number] |= {name: state[name].float() for name in _MOMENTS if name in state}
        return {**saved, "state": plain}

    def _keep_rests(self, _: Optimizer, __: dict[str, Any]) -> None:
        from flopwise.kernels.adamw_kernels import LOW

        self._rests = {p: state[LOW] for p, state in self.optimizer.state.items() if LOW in state}

    def _loaded(self, _: Optimizer) -> None:
        from flopwise.kernels.adamw_kernels import LOW

        for p, rest in self._rests.items():
            self.optimizer.state[p][LOW] = rest
        self._share()
        self._take_state()

    def _give_back(self) -> None:
        """State as torch's own optimizer keeps it."""
        from flopwise.kernels.adamw_kernels import LOW

        for p, state in self.optimizer.state.items():
            state.pop(LOW, None)
            on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
            if "step" in state and not on_device:
                state["step"] = state["step"].detach().to("cpu", copy=True)
            for name in _MOMENTS:
                if name in state:
                    state[name] = state[name].to(p.dtype)


def check_adamw(optimizer: Optimizer, asked: str, narrow: bool) -> None:
    """Refuse, by name, what our AdamW does not compute."""
    name = type(optimizer).__name__
    if type(optimizer) not in (Adam, AdamW):
        raise Unsupported(
            f"{asked} does not know {name}", "it takes the place of torch's AdamW, and of Adam without decay"
        )
    for group in optimizer.param_groups:
        wide = next((p.dtype for p in group["params"] if p.dtype not in _DTYPES), None)
        if wide is not None:
            raise Unsupported(f"{asked} takes fp32, bf16 and fp16 weights, not {wide}", "keep your optimizer")
        odd = [option for option in ("amsgrad", "maximize", "differentiable") if group.get(option)]
        if odd:
            raise Unsupported(f"{asked} has no {odd[0]}, and this {name} has it", "keep your optimizer")
        decoupled = group.get("decoupled_weight_decay", type(optimizer) is AdamW)
        if not decoupled and group["weight_decay"]:
            raise Unsupported(
                f"{asked}: Adam's weight decay goes through the moments", "use torch's AdamW, or no decay"
            )
        beta2 = float(group["betas"][1])
        if narrow and beta2 > LARGEST_BETA2:
            text = f"{asked}: with β₂ = {beta2:g} a second moment in bf16 would never decay"
            raise Unsupported(text, f"β₂ up to {LARGEST_BETA2:g}, as in betas=(0.9, 0.95); or optimizer = flopwise")
