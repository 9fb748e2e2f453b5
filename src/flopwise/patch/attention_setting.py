"""Models of transformers that run attention written out (`attn_implementation="eager"`), switched to their own SDPA.

The switch is checked at the model's first call: its forward runs once either way without gradients, which shows what each
attention module gets; then one module of each kind runs on that both ways, forward and backward.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flopwise.patch.checked import Forward, Kind, can_check, forward_of, holding_in, put_forward, without_dropout
from flopwise.patch.patched import Patched

SETTING = "_attn_implementation_internal"  # of a config: what its `attn_implementation` is kept in
EAGER, SDPA = "eager", "sdpa"


def switch_to_sdpa(model: nn.Module, patched: Patched) -> tuple[int, set[nn.Module]]:
    """How many models were switched, and all modules under those that have the setting, whatever it is."""
    switched, under = 0, set[nn.Module]()
    for module in model.modules():
        if module in under or not hasattr(module, "set_attn_implementation"):
            continue
        under |= set(module.modules())
        if EAGER not in _settings(module).values():
            continue
        why = _why_not(module)
        if why:
            patched.refused.append(f"attention: {type(module).__name__}: {why}")
        else:
            kind = Kind("attention", type(module).__name__, "switched from eager to SDPA", patched)
            put_forward(module, _forward(forward_of(module), kind, patched), patched)
            kind.count()
            switched += 1
    return switched, under


def runs_sdpa(module: nn.Module) -> bool:
    """Whether it is a model of transformers that runs SDPA as it is."""
    return hasattr(module, "set_attn_implementation") and SDPA in _settings(module).values()


def _configs(module: nn.Module) -> list[Any]:
    """The configs that a model and the models in it read, each once."""
    configs = [config for one in module.modules() if hasattr(config := getattr(one, "config", None), SETTING)]
    return list({id(config): config for config in configs}.values())


def _settings(module: nn.Module) -> dict[int, str]:
    return {id(config): getattr(config, SETTING) for config in _configs(module)}


def _why_not(module: nn.Module) -> str:
    """What this model does to its attention that SDPA cannot do; '' if nothing."""
    models = [one for one in module.modules() if hasattr(one, "set_attn_implementation")]
    for config in _configs(module):
        if getattr(config, "attn_logit_softcapping", None) is not None:
            return "caps its scores softly (attn_logit_softcapping), which SDPA cannot"
        if getattr(config, "reorder_and_upcast_attn", False):
            return "computes its scores in fp32 (reorder_and_upcast_attn), which its SDPA does not"
        if getattr(config, "output_attentions", False):
            return "returns its attention weights (output_attentions)"
    return "" if all(getattr(one, "_supports_sdpa", False) for one in models) else "its class has no SDPA"


def _forward(original: Forward, kind: Kind, patched: Patched) -> Forward:
    """A model's forward, which sets SDPA at its first call if the check allows it."""
    checked: list[bool] = []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not checked and can_check() and not _caches(args, kwargs):
            checked.append(True)
            eager = [config for config in _configs(self) if getattr(config, SETTING) == EAGER]
            if _agrees(self, eager, kind, lambda: original(self, *args, **kwargs)):
                for config in eager:
                    patched.set(config, SETTING, SDPA)
        if kwargs.get("output_attentions"):  # SDPA has none
            with _set([config for config in _configs(self) if getattr(config, SETTING) == SDPA], EAGER):
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a key/value cache is given: every call would add to it, those of a check as well."""
    given = any(hasattr(one, "get_seq_length") for one in (*args, *kwargs.values()))
    return given or any("past" in name and value is not None for name, value in kwargs.items())


@contextmanager
def _set(configs: list[Any], value: str) -> Iterator[None]:
    before = [getattr(config, SETTING) for config in configs]
    for config in configs:
        setattr(config, SETTING, value)
    try:
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            setattr(config, SETTING, old)


@dataclass(frozen=True)
class _Given:
    """What an attention module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor | None:
        """The states that it reads."""
        tensors = (one for one in (*self.args, *self.kwargs.values()) if isinstance(one, Tensor))
        return next((one for one in tensors if one.is_floating_point() and one.dim() == 3), None)

    def output(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """What the module makes of other states, without a cache."""
        new = [hidden if one is self.hidden else one for one in self.args]
        named = {name: hidden if one is self.hidden else one for name, one in self.kwargs.items() if "past" not in name}
        made = module(*new, **named)
        return made if isinstance(made, Tensor) else made[0]


def _agrees(model: nn.Module, eager: list[Any], kind: Kind, call: Callable[[], object]) -> bool:
    """Whether one attention module of each kind gives the same both ways."""
    written = _inputs(model, call)
    with _set(eager, SDPA):
        switched = _inputs(model, call)
    pairs = [(module, given, switched.get(module)) for module, given in written.items()]
    if not pairs:
        kind.give_up("no attention module of its own was called, so that nothing can be compared")
    for module, before, after in pairs:
        if before.hidden is None or after is None or after.hidden is None:
            kind.give_up(f"what {type(module).__name__} reads is not known")
            return False

        def sdpa(hidden: Tensor, module: nn.Module = module, given: _Given = after) -> Tensor:
            with _set(eager, SDPA):
                return given.output(module, hidden)

        def precise(hidden: Tensor, module: nn.Module = module, given: _Given = before) -> Tensor:
            with holding_in(module, hidden.dtype):
                return given.output(module, hidden)

        hidden = before.hidden.detach().requires_grad_(torch.is_grad_enabled())
        with without_dropout(module):
            if not kind.allows(_sort(module), partial(before.output, module), sdpa, [hidden], precise):
                return False
    return bool(pairs)


def _sort(module: nn.Module) -> Hashable:
    settings = {name: getattr(module, name, None) for name in ("is_causal", "sliding_window", "layer_type")}
    return type(module), tuple(settings.values())


def _inputs(model: nn.Module, call: Callable[[], object]) -> dict[nn.Module, _Given]:
    """What the first attention module of each kind gets in a call of the model, which leaves no trace."""
    found: dict[nn.Module, _Given] = {}
    sorts: set[Hashable] = set()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _sort(module) not in sorts:
            sorts.add(_sort(module))
            found[module] = _Given(args, dict(kwargs))

    innermost = [one for one in model.modules() if _is_attention(one) and not any(map(_is_attention, one.children()))]
    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in innermost]
    devices = sorted({one.device.index for one in model.parameters() if one.is_cuda})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            call()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not type(module).__module__.startswith("torch.")
