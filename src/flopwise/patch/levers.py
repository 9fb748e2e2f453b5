"""A recipe's levers put onto a model and its optimizers that somebody else wrote; each is done, or refused by name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.optim import Optimizer

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.patch import fp8
from flopwise.patch.blocks import blocks_of
from flopwise.patch.checkpointing import recompute
from flopwise.patch.compiling import before_head, compile_modules, stop_caching
from flopwise.patch.copies import let_copies_be_originals
from flopwise.patch.loss import find_head, fuse_loss
from flopwise.patch.masks import keep_masks_away
from flopwise.patch.masters import ExactWeights
from flopwise.patch.optimizer import OwnUpdate, check_fusable, fuse_optimizer, make_capturable
from flopwise.patch.overlap import OverlappedUpdate
from flopwise.patch.patched import Patched
from flopwise.spec.recipe import FP8, OWN_OPTIMIZERS, WITH_MASTERS

BACKENDS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-master": torch.bfloat16} | dict.fromkeys(
    FP8, torch.bfloat16
)
MODULE_LEVERS = (
    "norm",
    "activation",
    "rope",
    "attention",
    "projections",
)  # levers that replace modules: checked at their first call


_AS_WRITTEN = ("eager", "separate")  # values that no module is replaced for


class PatchedModel:
    """Levers on the modules and optimizers of one step. What surrounds the step (autocast, graph) is for who runs it."""

    def __init__(self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], levers: dict[str, Any]) -> None:
        self.roots, self.optimizers, self.levers = list(roots), list(optimizers), levers
        self.patched = Patched()
        self.checkpointed = 0  # blocks
        self.updates: list[OwnUpdate] = []
        self.exact: list[ExactWeights] = []
        self.overlapped: list[OverlappedUpdate] = []
        self.in_fp8: list[str] = []  # of each model: how many linear layers, and which not
        self._head: nn.Linear | None = None
        self._compiled = self._remembers_masks = False

    def install(self) -> None:
        """Put every lever on but compilation; raises Unsupported, which names those that cannot be, with nothing changed."""
        problems: list[Unsupported] = []
        for lever in [name for name in _ORDER if name in self.levers]:
            try:
                _ORDER[lever](self)
            except FlopwiseError as error:
                problems.append(Unsupported(error.message, error.hint, (lever,)))
        if not {"compile", "graph", "checkpoint"}.isdisjoint(self.levers):
            stop_caching(self.roots, self.patched)  # what is computed again would be cached again
        if "compile" in self.levers or "graph" in self.levers:
            self._remembers_masks = keep_masks_away(self.roots, self.patched)
        for root in self.roots:
            let_copies_be_originals(root, self.exact_weight, self.patched)
        if problems:
            self.patched.undo()
            message = "; ".join(problem.message for problem in problems)
            raise Unsupported(message, problems[0].hint, tuple(lever for one in problems for lever in one.levers))

    @property
    def compiles_after_first_step(self) -> bool:
        """Replaced modules are compared with the originals at their first call, which no compiler must see."""
        return "compile" in self.levers and (
            self._remembers_masks or any(name in self.levers for name in MODULE_LEVERS)
        )

    def compile(self) -> None:
        """Compile what the recipe says, once."""
        value = self.levers.get("compile", "off")
        if self._compiled or value == "off":
            return
        self._compiled = True
        compile_modules(self._targets(value), self.roots, value, self.patched)

    def undo(self) -> None:
        """Give back what was there."""
        self.patched.undo()

    def _targets(self, value: str) -> list[nn.Module]:
        if value == "blocks":
            return self._blocks(f"compile = '{value}'")
        roots, head = self._some_roots(f"compile = '{value}'"), self._head
        return roots if head is None else [module for root in roots for module in before_head(root, head)]

    # --- one lever each

    def _replace_modules(self, lever: str) -> None:
        value, replaced = self.levers[lever], 0
        if value in _AS_WRITTEN:
            raise Unsupported(
                f"{lever} = '{value}' cannot be put onto a step: it runs as it is written", f"omit {lever}"
            )
        for root in self._some_roots(f"{lever} = '{value}'"):
            replaced += _replacer(lever)(root, value, self.patched)
        if not replaced:
            why = "; ".join(line for line in self.patched.refused if line.startswith(f"{lever}:"))
            raise Unsupported(
                f"{lever} = '{value}' found nothing to replace{': ' + why if why else ''}", f"omit {lever}"
            )

    def _fuse_loss(self) -> None:
        self._head = find_head(self._some_roots("loss = 'fused'"))
        fuse_loss(self._head, self.patched)

    def _optimizer(self) -> None:
        form = self.levers["optimizer"]
        if not self.optimizers:
            raise Unsupported(
                f"optimizer = '{form}' found no optimizer", "give it to apply, or build it in the factory"
            )
        if form == "fused":
            check_fusable(self.optimizers)
            for optimizer in self.optimizers:
                fuse_optimizer(optimizer, self.patched)
        elif form in OWN_OPTIMIZERS:
            self._own_optimizers()
        else:
            raise Unsupported(
                f"optimizer = '{form}' cannot be put onto this step", "allowed: fused, flopwise, flopwise-bf16"
            )
        self.patched.done.append(f"optimizer: {type(self.optimizers[0]).__name__} as {form}")

    def _own_optimizers(self) -> None:
        narrow, master = self.levers["optimizer"] == "flopwise-bf16", self.levers.get("precision") in WITH_MASTERS
        self.updates = [OwnUpdate(one, self.patched, narrow=narrow, master=master) for one in self.optimizers]

    def _masters(self) -> None:
        if self.levers["precision"] == "bf16-pure":
            raise Unsupported("precision = 'bf16-pure' cannot be put onto a step", "bf16-master keeps weights exact")
        if self.levers["precision"] not in WITH_MASTERS:
            return
        asked = f"precision = '{self.levers['precision']}'"
        self._some_roots(asked)
        trained = self._trained()
        if not trained or not self.optimizers:
            raise Unsupported(f"{asked} is for a step that trains", "precision = bf16")
        if self.levers["precision"] in FP8:
            self._linear_layers_in_fp8(asked, trained)
        if self.levers["precision"] in FP8:
            trained = [root for root in trained if _has_wide_weights(root)]  # of bf16 weights there is no rest to keep
        ours = bool(self.updates)
        self.exact = [ExactWeights(root, self.optimizers, self.patched, ours=ours) for root in trained]

    def _linear_layers_in_fp8(self, asked: str, trained: list[nn.Module]) -> None:
        for root in trained:
            told = fp8.replace(root, self._blocks(asked), self.levers["precision"] == "fp8-rowwise", self.patched)
            self.in_fp8.append(told)

    def exact_weight(self, p: Tensor) -> Tensor:
        """A weight with what is kept of it elsewhere."""
        return next((held.exact(p) for held in self.exact if p in held.weights), p.detach())

    def _overlap(self) -> None:
        if not self.updates:
            hint = f"allowed: optimizer = {' or '.join(OWN_OPTIMIZERS)}"
            raise Unsupported("overlap = 'on' needs an optimizer that can be split", hint)
        if len(self.updates) > 1 or len(self._trained()) != 1:
            raise Unsupported("overlap = 'on' is for one model and one optimizer", "overlap = off")
        root = self._trained()[0]
        self.overlapped = [OverlappedUpdate(root, blocks_of([root]), self.updates[0], self.patched)]

    def _capturable(self) -> None:
        if not self.updates:  # ours always are
            for optimizer in self.optimizers:
                make_capturable(optimizer, self.patched)

    def _checkpoint(self) -> None:
        if not self.levers["checkpoint"]:
            raise Unsupported("checkpoint = 0: the step's own code recomputes its blocks", "omit checkpoint")
        blocks = self._blocks(f"checkpoint = {self.levers['checkpoint']}")
        recompute(blocks, self.patched, keep_random=self.levers.get("graph") != "on")
        self.checkpointed = len(blocks)

    def _not_written(self, lever: str) -> None:
        """What the code does by itself cannot be taken from it."""
        if self.levers[lever] == "off":
            raise Unsupported(f"{lever} = 'off': the step's own code has it on", f"omit {lever}")

    def _trained(self) -> list[nn.Module]:
        return [root for root in self.roots if any(p.requires_grad for p in root.parameters())]

    def _blocks(self, lever: str) -> list[nn.Module]:
        blocks = blocks_of(self._some_roots(lever))
        if not blocks:
            text = f"{lever} found no blocks: no nn.ModuleList or nn.Sequential of one class"
            raise Unsupported(text, "keep the model's layers in an nn.ModuleList")
        return blocks

    def _some_roots(self, lever: str) -> list[nn.Module]:
        if not self.roots:
            text = f"{lever} found no module: the factory builds none"
            raise Unsupported(text, "build the model in the factory, not at its first use")
        return self.roots


def _has_wide_weights(root: nn.Module) -> bool:
    return any(p.dtype == torch.float32 for p in root.parameters() if p.requires_grad)


def _replacer(lever: str) -> Callable[[nn.Module, str, Patched], int]:
    from flopwise.patch import attention, mlp, norms, projections, rotary

    return {
        "norm": norms.replace,
        "activation": mlp.replace,
        "rope": rotary.replace,
        "attention": attention.replace,
        "projections": lambda root, _, patched: projections.replace(root, patched),
    }[lever]


def _attention(model: PatchedModel) -> None:
    if model.levers["attention"] == "naive":
        raise Unsupported("attention = 'naive': the step's own code has it otherwise", "omit attention")
    if model.levers["attention"] == "sdpa":  # a backend alone is chosen around the step
        model._replace_modules("attention")


def _projections(model: PatchedModel) -> None:
    if model.levers.get("precision") in FP8:
        text = f"projections = 'fused' does not go with {model.levers['precision']} on a step of your own"
        raise Unsupported(text, "omit projections")
    model._replace_modules("projections")


def _modules(lever: str) -> Callable[[PatchedModel], None]:
    return lambda model: model._replace_modules(lever)


# In this order: weights are joined before they are cast, and cast before they are given to the passes that update them.
_ORDER: dict[str, Callable[[PatchedModel], None]] = {
    "norm": _modules("norm"),
    "activation": _modules("activation"),
    "rope": _modules("rope"),
    "attention": _attention,
    "projections": _projections,
    "loss": PatchedModel._fuse_loss,
    "optimizer": PatchedModel._optimizer,
    "precision": PatchedModel._masters,
    "overlap": PatchedModel._overlap,
    "graph": PatchedModel._capturable,
    "checkpoint": PatchedModel._checkpoint,
}
