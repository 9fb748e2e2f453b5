"""torch.compile of modules in place: whole models, what lies before the head, or block by block."""

from collections.abc import Iterator, Sequence
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from flopwise import torch_private
from flopwise.errors import Unsupported
from flopwise.patch.blocks import compile_blocks
from flopwise.patch.patched import Patched

# The graph is a lever of its own.
MODES = {
    "default": None,
    "max-autotune": "max-autotune-no-cudagraphs",
    "blocks": None,
    "reduce-overhead": "reduce-overhead",
}


def compile_modules(targets: Sequence[nn.Module], roots: Sequence[nn.Module], value: str, patched: Patched) -> None:
    """Compile each target in place; refused where the step compiles its own."""
    inside = [module for root in roots for module in root.modules()]
    if any(torch_private.is_compiled(m) or torch_private.compiled_call(m) is not None for m in inside):
        raise Unsupported(f"compile = '{value}': the step compiles its own modules already", "omit compile")
    skipped = [module for module in targets if _skipped_by_compiler(module)]
    compile_blocks([module for module in targets if module not in skipped], mode=MODES[value])
    compile_torch_modules(skipped, mode=MODES[value])
    for module in targets:
        patched.on_undo(lambda module=module: torch_private.set_compiled_call(module, None))  # type: ignore[misc]
    names = ", ".join(dict.fromkeys(type(module).__name__ for module in targets))
    patched.done.append(f"compile: {len(targets)} × {names}" if len(targets) > 1 else f"compile: {names}")


def stop_caching(roots: Sequence[nn.Module], patched: Patched) -> None:
    """Training fills no key/value cache: transformers' makes every layer a case of its own, and copies keys and values."""
    configs = {id(config): config for root in roots for module in root.modules() if (config := _caching(module))}
    for config in configs.values():
        patched.set(config, "use_cache", False)
    if configs:
        told = "cache: no key/value cache (config.use_cache = False), as training needs none; without one, transformers reads"
        patched.done.append(f"{told} position_ids that begin again as packed sequences")


def _caching(module: nn.Module) -> Any:
    config = getattr(module, "config", None) if module.training else None
    return config if getattr(config, "use_cache", None) is True else None


def before_head(module: nn.Module, head: nn.Module) -> Iterator[nn.Module]:
    """The largest modules that can be called and do not hold the head: its logits wait for the loss, outside any graph."""
    if module is head:
        return
    callable_ = not isinstance(module, nn.ModuleList | nn.ModuleDict)
    if callable_ and not any(inner is head for inner in module.modules()):
        yield module
        return
    for child in module.children():
        yield from before_head(child, head)


def compile_torch_modules(modules: Sequence[nn.Module], **options: Any) -> None:
    """Compile in place modules of torch.nn's own classes, whose files the compiler skips: their `compile()` does nothing.

    Each is called by a function from this file. Modules that print alike share its code, and so a graph; others do not: one
    code for all would have few graphs, and shapes that are not fixed.
    """
    codes: dict[str, CodeType] = {}
    for module in modules:
        call = _call_of(module)
        call.__code__ = codes.setdefault(repr(module), call.__code__.replace(co_name=f"call_{len(codes)}"))
        torch_private.set_compiled_call(module, torch.compile(call, **options))


def _skipped_by_compiler(module: nn.Module) -> bool:
    return isinstance(module.forward, MethodType) and torch_private.compiler_skips(module.forward)


def _call_of(module: nn.Module) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return torch_private.call_uncompiled(module, *args, **kwargs)

    return call
