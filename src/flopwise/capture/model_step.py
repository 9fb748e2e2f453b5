"""A language model's step: forward, loss, backward, optimizer, with the recipe's levers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from flopwise import units
from flopwise.capture.hf_model import HfModel
from flopwise.capture.memory_limit import memory_bytes
from flopwise.capture.step import Step
from flopwise.errors import Unsupported
from flopwise.lm.attention import sdpa_backend_name
from flopwise.lm.generation import Generation
from flopwise.lm.loss import hidden_loss, loss_full
from flopwise.lm.optimizer import make_optimizer
from flopwise.lm.overlap import UpdateInBackward, parameter_groups
from flopwise.lm.own_kernels import own_levers, written_out
from flopwise.lm.precision import (
    apply_fp32_matmul,
    autocast,
    fp32_matmul_probe,
    has_fp8,
    on_fake_tensors,
    torch_dtype,
    weights_dtype,
)
from flopwise.lm.schedule import warmup_cosine
from flopwise.lm.transformer import Transformer
from flopwise.patch.blocks import blocks_of, compile_blocks
from flopwise.patch.masters import exact_weight
from flopwise.records.run import Ran
from flopwise.spec.dtypes import dtype_name
from flopwise.spec.fp8 import GPU as FP8_GPU
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import FP8, REPLAYED, WITH_MASTERS, Recipe
from flopwise.spec.workload import Workload
from flopwise.torch_private import compile_cache_hits

PEAK_LR, LR_FLOOR, LR_WARMUP_STEPS, LR_TOTAL_STEPS = 1e-3, 0.1, 100, 10_000  # the floor is a share of the peak
LR_WIDTH = 768  # wider models learn at a lower rate: in three steps 2.7B would memorise its one batch
# The graph is a lever of its own. With `blocks` the loss is a function like any other.
COMPILE_MODES = {
    "default": None,
    "max-autotune": "max-autotune-no-cudagraphs",
    "blocks": None,
    REPLAYED: "reduce-overhead",
}


class ModelStep:
    """The phases of one step, and the tensors that pass between them."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        spec, recipe = cast(ModelSpec, workload.subject), workload.recipe
        check_supported(recipe, device)
        apply_fp32_matmul(recipe)
        _refuse_oversized(workload, device)
        self.workload, self.recipe, self.device = workload, recipe, device
        with torch.device(device):
            self.model = _build(workload)
            exact = _exact_weights(self.model, workload)
            self.model.to(weights_dtype(recipe))
            sizes = (workload.batch, 1 if workload.phase == "decode" else workload.context)
            self.tokens = torch.randint(spec.vocab, sizes)  # [B, T]
            self.targets = torch.randint(spec.vocab, sizes)  # [B, T]
        self.model.train(workload.trains)
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
        self.logits_of: Callable[[Tensor], Tensor] = self.model.forward
        if workload.generates:
            cached = torch_dtype(recipe.compute if recipe.cache == "compute" else recipe.cache)
            self.logits_of = Generation(cast(Transformer, self.model), workload.batch, workload.context, cached)
        self.hidden_of: Callable[[Tensor], Tensor] = self.model.hidden
        if recipe.compile == "blocks":
            compile_blocks(_blocks(self.model, workload), dynamic=False)
        self.share()
        if recipe.compile not in ("off", "blocks"):
            self.logits_of, self.hidden_of = compiled(self.logits_of, recipe), compiled(self.hidden_of, recipe)
        loss = loss_full if recipe.loss == "full" else hidden_loss(recipe.loss)
        self.loss_of: Callable[..., Tensor] = compiled(loss, recipe)
        self.peak_lr = PEAK_LR * min(1.0, LR_WIDTH / spec.d_model) ** 2
        self.optimizers: list[torch.optim.Optimizer] = []
        self.overlapped: UpdateInBackward | None = None
        if workload.phase == "train":
            self._make_optimizers(exact)
        self.steps = 0
        self.output: Tensor | None = None
        self.loss: Tensor | None = None

    def share(self) -> None:
        """Where several ranks have a part each: this one takes its own."""

    def make_optimizer(self, parameters: list[nn.Parameter], rate: float | Tensor) -> torch.optim.Optimizer:
        return make_optimizer(parameters, self.recipe, rate, self.recipe.graph == "on")

    def _make_optimizers(self, exact: dict[Tensor, Tensor]) -> None:
        """One for all weights, or one per block where the backward pass updates them. `exact`: the masters' fp32 values."""
        # One tensor, whatever the number of optimizers.
        graph = self.recipe.graph == "on"
        rate = torch.tensor(self.peak_lr, device=self.device) if graph else self.peak_lr

        def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            params = list(parameters)
            optimizer = self.make_optimizer(params, rate)
            if exact:
                cast(Any, optimizer).set_masters({p: exact[p] for p in params})
            return optimizer

        if self.recipe.overlap == "on":
            self.overlapped = UpdateInBackward(parameter_groups(self.model, blocks_of([self.model])), make)
            self.optimizers = self.overlapped.optimizers
        else:
            self.optimizers = [make(self.model.parameters())]

    def phases(self) -> dict[str, Callable[[], object]]:
        if not self.workload.trains:
            return {"forward": self.infer}
        each: dict[str, Callable[[], object]] = {"forward": self.forward, "loss": self.compute_loss}
        each["backward"] = self.backward
        if self.overlapped is not None:
            each = {phase: self.overlapped.ahead()(run) for phase, run in each.items()}
        return each | ({"optimizer": self.update} if self.optimizers else {})

    def begin(self) -> None:
        """What a compiler's own CUDA graphs have left of the last step may be written over."""
        if self.recipe.compile == REPLAYED:
            torch.compiler.cudagraph_mark_step_begin()

    def infer(self) -> None:
        self.begin()
        with torch.no_grad(), autocast(self.recipe, self.device.type):
            self.output = None
            self.output = self.logits_of(self.tokens)

    def forward(self) -> None:
        self.begin()
        self.model.zero_grad(set_to_none=True)
        self.loss = None  # the last step's graph must not outlive it
        with autocast(self.recipe, self.device.type):
            self.output = (self.logits_of if self.recipe.loss == "full" else self.hidden_of)(self.tokens)

    def compute_loss(self) -> None:
        with autocast(self.recipe, self.device.type):
            if self.recipe.loss == "full":
                self.loss = self.loss_of(self.output, self.targets)
            else:
                self.loss = self.loss_of(self.output, self.model.head_weight, self.targets)
        self.output = None

    def backward(self) -> None:
        assert self.loss is not None
        if self.overlapped is not None and self.recipe.graph == "off":
            self.set_learning_rate()  # the updates are part of the backward pass
        self.scaler.scale(self.loss).backward()
        self.loss = self.loss.detach()
        if self.recipe.compile == REPLAYED:
            self.loss = self.loss.clone()  # it lies in a graph's memory, which the next step writes over

    def update(self) -> None:
        if self.overlapped is not None:
            self.overlapped.finish()
            return
        if self.recipe.graph == "off":
            self.set_learning_rate()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def learning_rate(self, step: int) -> float:
        """The schedule's."""
        steps = {"warmup_steps": LR_WARMUP_STEPS, "total_steps": LR_TOTAL_STEPS}
        return warmup_cosine(step, peak=self.peak_lr, floor=LR_FLOOR * self.peak_lr, **steps)

    def set_learning_rate(self) -> None:
        """The schedule's next rate; in a graph it is written into the tensor that the graph reads."""
        self.steps += 1
        rate = self.learning_rate(self.steps)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if isinstance(groups[0]["lr"], Tensor):
            groups[0]["lr"].fill_(rate)  # which all share
            return
        for group in groups:
            group["lr"] = rate

    def ran(self) -> Ran:
        """Read off the built model, not from the recipe."""
        weight = next(self.model.parameters())
        with torch.no_grad(), autocast(self.recipe, self.device.type):
            probe = torch.zeros(16, 16, dtype=weight.dtype, device=self.device)
            compute = (probe @ probe).dtype
        return Ran(
            device=str(self.device),
            parameters=sum(p.numel() for p in self.model.parameters()),
            weights=dtype_name(weight.dtype),
            compute=dtype_name(compute),
            fp32_matmul=fp32_matmul_probe(self.device),
            attention=self._attention(compute),
            optimizer=_optimizer_name(self.optimizers),
            kernels=written_out(self.device.type, own_levers(self.recipe)),
            loss=None if self.loss is None else float(self.loss),
            inductor_cache_hits=compile_cache_hits(),
        )

    def _attention(self, dtype: torch.dtype) -> str:
        if self.recipe.attention != "sdpa":
            return self.recipe.attention
        spec, w = cast(ModelSpec, self.workload.subject), self.workload
        options: dict[str, Any] = {"dtype": dtype, "device": self.device, "requires_grad": w.trains}
        lengths = (1 if w.phase == "decode" else w.context, w.context, w.context)
        q, k, v = (torch.empty(w.batch, spec.n_heads, length, spec.head_dim, **options) for length in lengths)
        return f"sdpa: {sdpa_backend_name(q, k, v, causal=w.phase != 'decode')}"


def model_step(workload: Workload, device: torch.device, kind: type[ModelStep] = ModelStep) -> Step:
    """The workload's phases on the device."""
    step = kind(workload, device)
    return Step(
        phases=step.phases(),
        ran=step.ran,
        model=step.model if workload.recipe.compile in ("off", "blocks") else None,  # compiled whole, modules are gone
        optimizers=step.optimizers,
        before_replay=step.set_learning_rate if step.optimizers else None,
        trained=step.model,
        loss=lambda: step.loss,
        loss_scale=step.scaler.get_scale,
        exact_weight=lambda weight: exact_weight(weight, step.optimizers),
    )


def _refuse_oversized(workload: Workload, device: torch.device) -> None:
    """Refuse at once what cannot fit: the weights (with gradients and state, if trained) and one batch."""
    if on_fake_tensors():
        return
    spec, recipe = cast(ModelSpec, workload.subject), workload.recipe
    copies = {"backward": 2, "train": 4}.get(workload.phase, 1) - (recipe.overlap == "on")
    weights = spec.parameters() * weights_dtype(recipe).itemsize * copies
    tokens = workload.batch * workload.context
    if workload.generates:
        rows = 2 * tokens * spec.n_layers * spec.n_kv_heads * spec.head_dim  # of the cache
    else:
        rows = tokens * max(spec.d_model, spec.vocab if recipe.loss == "full" else 0)
    least = weights + rows * 2 + tokens * 16
    available = memory_bytes(device)
    if least > available:
        raise MemoryError(f"out of memory: needs at least {units.size(least)} of {units.size(available)}")


def _build(workload: Workload) -> HfModel | Transformer:
    if workload.implementation == "transformers":
        return HfModel(workload)
    return Transformer(cast(ModelSpec, workload.subject), workload.recipe, workload.context + workload.generates)


def _exact_weights(model: nn.Module, workload: Workload) -> dict[Tensor, Tensor]:
    """The fp32 weights of a model that is about to be cast, where they are needed afterwards: as masters."""
    if workload.recipe.precision not in WITH_MASTERS or workload.phase != "train":
        return {}
    return {p: p.detach() for p in model.parameters()}


def _blocks(model: nn.Module, workload: Workload) -> list[nn.Module]:
    blocks = blocks_of([model])
    if not blocks:
        text = f"compile = 'blocks' found no list of blocks of one class in {workload.target}"
        raise Unsupported(text, "use compile = default")
    return blocks


def compiled(function: Callable[..., Any], recipe: Recipe) -> Callable[..., Any]:
    """The function under the recipe's `compile` lever."""
    if recipe.compile == "off":
        return function
    return torch.compile(function, mode=COMPILE_MODES[recipe.compile], dynamic=False)


# What runs on a GPU alone: fp8 elsewhere is emulated, for tests.
GPU_ALONE = {
    "precision": ("tf32", *FP8),
    "graph": ("on",),
    "attention": ("sdpa-cudnn",),
    "activation": ("cuda",),
    "compile": (REPLAYED,),
}


def check_supported(recipe: Recipe, device: torch.device) -> None:
    """Refuse what the recipe asks for and this device does not have."""
    if on_fake_tensors():
        return
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        has = ".".join(map(str, capability))
        if recipe.precision in FP8 and not has_fp8(device):
            text = f"precision = '{recipe.precision}' needs {FP8_GPU}; this one has {has}"
            raise Unsupported(text, "allowed here: bf16-master" if capability >= (8, 0) else "allowed here: fp16, fp32")
        if capability < (8, 0) and recipe.precision not in ("fp32", "fp16"):
            text = f"precision = '{recipe.precision}' needs compute capability 8.0 or higher; this GPU has {has}"
            raise Unsupported(text, "allowed here: fp16, fp32")
        return
    for lever, values in GPU_ALONE.items():
        if (value := getattr(recipe, lever)) in values:
            text = f"{lever} = '{value}' needs an NVIDIA GPU; this device is '{device.type}'"
            raise Unsupported(text, "choose another, or --device cuda")


def _optimizer_name(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    if len(optimizers) > 1:
        return f"{_optimizer_name(optimizers[:1])}, in backward in {len(optimizers)} groups"
    if not optimizers:
        return ""
    optimizer = optimizers[0]
    group = optimizer.param_groups[0]
    if type(optimizer).__module__.startswith("flopwise.kernels"):
        kept = ", moments bf16" if getattr(optimizer, "state_dtype", None) == torch.bfloat16 else ""
        return "AdamW flopwise capturable" + kept + (", fp32 masters" if getattr(optimizer, "master", False) else "")
    kind = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "loop"
    return f"{type(optimizer).__name__} {kind}" + (" capturable" if group.get("capturable") else "")
