"""A recipe put onto a model and an optimizer in a user's own script: what was done, what could not be, and the way back."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.optim import Optimizer

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.lm.precision import apply_fp32_matmul, has_fp8
from flopwise.patch.captured import CapturedStep
from flopwise.patch.levers import AUTOCAST, BACKENDS, MODULE_LEVERS, PatchedModel
from flopwise.spec.fp8 import GPU as FP8_GPU
from flopwise.spec.recipe import FP8, Recipe
from flopwise.spec.workload import FROM_OUTSIDE

WITHOUT_FP8 = {"precision": "bf16-master"}  # what fp8 builds upon
_INSTEAD = ": bf16-master instead"
_HALF = (torch.bfloat16, torch.float16)
_APPLIED: "WeakSet[nn.Module]" = WeakSet()  # models that have a recipe on: a second would take its own work for theirs


def _has_fp8(models: Sequence[nn.Module]) -> bool:
    devices = {p.device for model in models for p in model.parameters()}
    return all(one.type == "cuda" and has_fp8(one) for one in devices)


def _why_not(name: str, value: Any, on_gpu: bool) -> str:
    """Why this lever cannot be put onto a user's model; empty if it can."""
    if name not in FROM_OUTSIDE:
        return "cannot be put onto a model of your own"
    if (name, value) == ("precision", "fp16"):
        return "needs a loss scaler around your step: write it there"
    if (name in ("graph", "overlap") or value == "sdpa-cudnn") and not on_gpu:
        return "needs a model on a GPU"
    return ""


class Applied:
    """What `flopwise.apply` returns. Printed, it says what it did."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], levers: dict[str, Any]) -> None:
        self._model = PatchedModel(models, optimizers, {})
        self._refused: list[str] = []
        self._wants_graph = False
        self._calls: list[bool] = []  # whether a model's own forward was called
        if any(model in _APPLIED for model in models):
            hint = "put all levers into one recipe, or call .undo() of what the first call returned"
            raise FlopwiseError("this model has a recipe on already: flopwise.apply was called before", hint)
        self._install(models, optimizers, levers)
        for model in models:
            _APPLIED.add(model)
            self._model.patched.on_undo(lambda model=model: _APPLIED.discard(model))  # type: ignore[misc]

    @property
    def done(self) -> list[str]:
        """What was changed, a line each."""
        patched = self._model.patched
        told = [line.partition(":")[0] for line in (*patched.done, *patched.refused)]
        later = [name for name in MODULE_LEVERS if name in self._model.levers and name not in told]
        lines = [f"{name}: looked for at the first step" for name in later if self._model.levers[name] not in BACKENDS]
        return [*patched.done, *lines, *(["graph: give your step to .step()"] if self._wants_graph else [])]

    @property
    def refused(self) -> list[str]:
        """What the recipe asks for and this model cannot have, a line each."""
        return [*self._refused, *self._model.patched.refused]

    def step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The training step as one CUDA graph, if the recipe has one; else the step itself."""
        if not self._wants_graph:
            return step
        self._wants_graph = False
        return CapturedStep(step, self._model.optimizers, self._model.patched)

    def undo(self) -> None:
        """Give back the model and the optimizer as they were, with what they have learnt since."""
        self._model.undo()

    def __str__(self) -> str:
        lines = [f"  {line}" for line in self.done] + [f"  not done: {line}" for line in self.refused]
        checked = any(name in self._model.levers for name in MODULE_LEVERS)
        head = (
            "flopwise applied (modules are compared with the originals at the first step):"
            if checked
            else "flopwise applied:"
        )
        return "\n".join([head, *(lines or ["  nothing"])])

    # --- how

    def _install(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], levers: dict[str, Any]) -> None:
        """All that can be done: a lever that is refused is left out, and said."""
        levers = self._allowed_here(models, levers)
        while True:
            self._model = PatchedModel(models, optimizers, levers)
            try:
                self._model.install()
                break
            except Unsupported as error:
                narrower = "precision" in error.levers and levers["precision"] in FP8
                self._refused.append(error.message + _INSTEAD * narrower)
                levers = {name: value for name, value in levers.items() if name not in error.levers}
                levers |= WITHOUT_FP8 if narrower else {}
        self._wants_graph = levers.get("graph") == "on"
        for model in models:
            self._surround(model, levers)
        if optimizers and (levers.get("precision") in AUTOCAST or levers.get("attention") in BACKENDS):
            self._look_for_calls(" or ".join(dict.fromkeys(type(model).__name__ for model in models)), optimizers[0])
        if levers.get("precision") == "tf32":
            apply_fp32_matmul(Recipe(precision="tf32"))
        self._compile_in_time(optimizers)

    def _allowed_here(self, models: Sequence[nn.Module], levers: dict[str, Any]) -> dict[str, Any]:
        on_gpu = any(p.is_cuda for model in models for p in model.parameters())
        if levers.get("precision") in FP8 and not _has_fp8(models):
            self._refused.append(f"precision = '{levers['precision']}' needs {FP8_GPU}{_INSTEAD}")
            levers = levers | WITHOUT_FP8
        refused = {name: why for name, value in levers.items() if (why := _why_not(name, value, on_gpu))}
        self._refused += [f"{name} = '{levers[name]}' {why}" for name, why in refused.items()]
        return {name: value for name, value in levers.items() if name not in refused}

    def _surround(self, model: nn.Module, levers: dict[str, Any]) -> None:
        """Autocast and the attention backend around the model's forward; what leaves it is fp32, as a loss wants it."""
        dtype, backend = AUTOCAST.get(levers.get("precision", "")), BACKENDS.get(levers.get("attention", ""))
        if dtype is None and backend is None:
            return
        original, kind = model.forward, next((p.device.type for p in model.parameters()), "cpu")

        calls = self._calls

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not calls:
                calls.append(True)
            with ExitStack() as stack:
                if dtype is not None:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
                if backend is not None:
                    stack.enter_context(sdpa_kernel(backend))
                result = original(*args, **kwargs)
            return result if dtype is None else _widened(result)

        self._model.patched.set(model, "forward", forward)
        if dtype is not None:
            self._model.patched.done.append(f"precision: forward under autocast to {str(dtype).removeprefix('torch.')}")
        if backend is not None:
            self._model.patched.done.append(f"attention: {levers['attention']}")

    def _look_for_calls(self, name: str, optimizer: Optimizer) -> None:
        """After the first step: what stands around a model's forward has done nothing where the step calls something else."""

        def look(*_: Any) -> None:
            hook.remove()
            if not self._calls:
                why = f"precision, attention: the step calls parts or methods of {name}, not it, and so runs without autocast"
                self._refused.append(f"{why}: write torch.autocast around your loss")
                sys.stderr.write(f"flopwise: not done: {self._refused[-1]}\n")

        hook = optimizer.register_step_post_hook(look)
        self._model.patched.on_undo(hook.remove)

    def _compile_in_time(self, optimizers: Sequence[Optimizer]) -> None:
        """At once; or after the first step, where replaced modules are compared with the originals in it."""
        if not self._model.compiles_after_first_step or not optimizers:
            self._compile()
            return

        def compile_once(*_: Any) -> None:
            hook.remove()
            self._compile()

        hook = optimizers[0].register_step_post_hook(compile_once)
        self._model.patched.on_undo(hook.remove)
        self._model.patched.done.append("compile: after the first step, in which replaced modules are checked")

    def _compile(self) -> None:
        try:
            self._model.compile()
        except FlopwiseError as error:
            self._refused.append(error.message)


def _widened(value: Any) -> Any:
    """Half-precision tensors as fp32; a mapping (a transformers output) keeps its class."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if type(value) in (tuple, list):
        return type(value)(_widened(one) for one in value)
    if isinstance(value, dict):
        for name in list(value):
            value[name] = _widened(value[name])
    return value


def say(applied: Applied) -> None:
    """To stderr: a script's own output stays its own."""
    sys.stderr.write(f"{applied}\n")
