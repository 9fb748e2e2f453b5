"""Levers applied to a user's step without changing its code: to what its factory built, and around its phases."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from flopwise import torch_private
from flopwise.capture.blocks import blocks_of, compile_blocks
from flopwise.capture.built_objects import BuiltObjects
from flopwise.capture.model_step import COMPILE_MODES, check_supported
from flopwise.errors import Unsupported, one_line
from flopwise.lm.precision import apply_fp32_matmul, autocast
from flopwise.spec.recipe import Recipe

Phases = dict[str, Callable[[], object]]

# The backward pass runs in its forward ops' dtypes, the update in the weights'.
NOT_AUTOCAST = ("backward", "optimizer")
_BACKENDS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
_FUSABLE = (Adam, AdamW, SGD)


class AppliedLevers:
    """One step's levers. The recipe's defaults leave the step as it is written."""

    def __init__(self, recipe: Recipe, built: BuiltObjects, device: torch.device) -> None:
        self.recipe, self.built, self.device = recipe, built, device
        self.checkpointed = 0  # blocks
        self._graphs_before = self._frames_before = 0

    def apply(self, phases: Phases) -> Phases:
        """Change what was built, and return the phases that run under the levers."""
        recipe = self.recipe
        check_supported(recipe, self.device)
        if recipe.precision == "fp16":
            self._check_scaler(phases)
        if recipe.precision == "tf32":
            apply_fp32_matmul(recipe)
        if recipe.optimizer == "fused":
            self._fuse_optimizers()
        if recipe.graph == "on":
            for optimizer in self.built.optimizers:
                make_capturable(optimizer)
        if recipe.checkpoint:
            self._checkpoint()
        if recipe.compile != "off":
            self._compile()
        if not recipe.changed():
            return phases
        return self._first_step_checked({name: self._around(name, run) for name, run in phases.items()})

    # --- precision and attention: around the phases

    def _around(self, name: str, run: Callable[[], object]) -> Callable[[], object]:
        backend = _BACKENDS.get(self.recipe.attention)

        def phase() -> object:
            with ExitStack() as stack:
                stack.enter_context(self._failures_explained())
                if name not in NOT_AUTOCAST:
                    stack.enter_context(autocast(self.recipe, self.device.type))
                if backend is not None:
                    stack.enter_context(sdpa_kernel(backend))
                return run()

        return phase

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """A lever that the step cannot run under becomes `Unsupported`, which names the lever."""
        try:
            yield
        except torch_private.compiler_error() as error:
            if self.recipe.compile == "off":
                raise
            raise Unsupported(
                f"compile = '{self.recipe.compile}' fails on this step: {one_line(str(error), 200)}",
                "compile = off; or compile in your own code the part that can be",
            ) from error
        except RuntimeError as error:
            if self.recipe.attention in _BACKENDS and "No available kernel" in str(error):
                raise Unsupported(
                    f"attention = '{self.recipe.attention}' cannot run this step's attention",
                    "try precision = bf16 with it, or attention = sdpa, which picks a backend that can",
                ) from error
            raise

    def _check_scaler(self, phases: Phases) -> None:
        trains = bool(self.built.optimizers) or "backward" in phases
        if trains and not self.built.scales_losses:
            raise Unsupported(
                "precision = 'fp16' needs a loss scaler, and the step has none: small gradients would become zero",
                "use torch.amp.GradScaler in the step, or precision = bf16",
            )

    # --- the optimizer

    def _fuse_optimizers(self) -> None:
        if not self.built.optimizers:
            text = "optimizer = 'fused' found no optimizer: the factory builds none"
            raise Unsupported(text, "build it in the factory")
        unknown = [type(optimizer).__name__ for optimizer in self.built.optimizers if type(optimizer) not in _FUSABLE]
        if unknown:
            raise Unsupported(f"optimizer = 'fused' does not know {unknown[0]}", "it knows torch's Adam, AdamW and SGD")
        for optimizer in self.built.optimizers:
            fuse_optimizer(optimizer)

    # --- checkpointing and compilation: of the modules

    def _blocks(self, lever: str) -> list[nn.Module]:
        blocks = blocks_of(self._roots(lever))
        if not blocks:
            text = f"{lever} found no blocks: no nn.ModuleList or nn.Sequential of one class"
            raise Unsupported(text, "keep the model's layers in an nn.ModuleList")
        return blocks

    def _roots(self, lever: str) -> list[nn.Module]:
        if not self.built.roots:
            text = f"{lever} found no module: the factory builds none"
            raise Unsupported(text, "build the model in the factory, not at its first use")
        return self.built.roots

    def _checkpoint(self) -> None:
        blocks = self._blocks(f"checkpoint = {self.recipe.checkpoint}")
        for block in blocks:
            # A captured graph cannot save the generator's state: `_check_first_step` refuses random numbers there.
            block.forward = _recomputed(block.forward, keep_random=self.recipe.graph == "off")
        self.checkpointed = len(blocks)

    def _compile(self) -> None:
        lever = f"compile = '{self.recipe.compile}'"
        targets = self._blocks(lever) if self.recipe.compile == "blocks" else self._roots(lever)
        inside = [module for root in self.built.roots for module in root.modules()]
        if any(torch_private.is_compiled(m) or torch_private.compiled_call(m) is not None for m in inside):
            raise Unsupported(f"{lever}: the step compiles its own modules already", "omit compile")
        mode = COMPILE_MODES[self.recipe.compile]
        compile_blocks([module for module in targets if not _skipped_by_compiler(module)], mode=mode)
        compile_torch_modules([module for module in targets if _skipped_by_compiler(module)], mode=mode)
        self._graphs_before, self._frames_before = torch_private.compiled_graphs(), torch_private.compiled_frames()

    # --- what only a step that has run can show

    def _first_step_checked(self, phases: Phases) -> Phases:
        first, last = next(iter(phases)), next(reversed(phases))
        before: list[Tensor] = []
        done = False

        def begin() -> object:
            if not done and self._replays_recomputation:
                before[:] = [torch.cuda.get_rng_state(self.device)]
            return phases[first]() if first != last else end()

        def end() -> object:
            nonlocal done
            result = phases[last]()
            if not done:
                done = True
                self._check_first_step(before)
            return result

        return phases | {last: end} | {first: begin}

    @property
    def _replays_recomputation(self) -> bool:
        return bool(self.checkpointed) and self.recipe.graph == "on" and self.device.type == "cuda"

    def _check_first_step(self, before: list[Tensor]) -> None:
        if self.recipe.compile != "off" and torch_private.compiled_graphs() == self._graphs_before:
            nothing = f"compile = '{self.recipe.compile}' compiled nothing"
            if torch_private.compiled_frames() > self._frames_before:
                text = "the compiler takes none of the step's modules (nn.LSTM, nn.GRU and nn.RNN are such)"
                raise Unsupported(f"{nothing}: {text}", "compile = off")
            raise Unsupported(
                f"{nothing}: the step calls no module that its factory built",
                "call the module itself, not its forward, and build it in the factory",
            )
        if before and not torch.equal(before[0], torch.cuda.get_rng_state(self.device)):
            raise Unsupported(
                "checkpoint with graph = 'on' cannot recompute random numbers (dropout), and this step draws some",
                "switch dropout off, or omit one of the two",
            )


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


def fuse_optimizer(optimizer: Optimizer) -> None:
    """Make torch's Adam, AdamW or SGD what it is when built with fused=True; its rates and its state stay."""
    for group in (optimizer.defaults, *optimizer.param_groups):
        if group.get("differentiable"):
            raise Unsupported("optimizer = 'fused' cannot be differentiable", "build it without differentiable=True")
        group["fused"], group["foreach"] = True, False
    torch_private.takes_scaled_gradients(optimizer)
    _count_on_device(optimizer)


def make_capturable(optimizer: Optimizer) -> None:
    """What a CUDA graph needs of an optimizer: its step count on the device, where it has one."""
    for group in (optimizer.defaults, *optimizer.param_groups):
        if "capturable" in group:
            group["capturable"] = True
    _count_on_device(optimizer)


def _count_on_device(optimizer: Optimizer) -> None:
    """Move the step counts of an optimizer that has already made steps."""
    for parameter, state in optimizer.state.items():
        if "step" in state and isinstance(parameter, Tensor):
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


def _recomputed(forward: Callable[..., Any], keep_random: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=keep_random, **kwargs)

    return run
