"""What one step of the reference model must do and hold, phase by phase, before it is run: PyTorch in eager mode on a GPU."""

from collections.abc import Callable

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.predict.dry.architecture import architecture, architecture_of
from flopwise.predict.shapes import adamw, losses
from flopwise.predict.shapes.network import Network
from flopwise.predict.shapes.overlap import UpdateInBackward, updates_in_backward
from flopwise.predict.shapes.tape import Tape, Tensor
from flopwise.records.prediction import AFTER_BACKWARD, AFTER_FORWARD, SHAPES, START, KeptTensors, PredictedStep
from flopwise.records.run import PhaseMemory
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload
from flopwise.work.allocator import unsplit_bytes
from flopwise.work.operation import ACTIVATIONS, GRADIENTS, INPUTS, LOGITS, SCORES, WORKSPACE, Footprint

_AUTOCAST = {"bf16": "bf16", "fp16": "fp16"}
_ON_CPU = "the shape simulator's is a GPU without its workspace; the CPU's norms and attention save other tensors"
DEEPEST = 1000  # layers; it takes half a minute
MOST_CHUNKS = 2**13  # of the loss: about a second


def account_step(workload: Workload, gpu: Gpu | None = None, optimizer_bits: int = 32) -> PredictedStep:
    """Every op of one step with its work, and the memory by owner. `gpu` picks SDPA's backend and cuBLAS's workspace.

    `optimizer_bits = 8` accounts for moments kept in 8 bits: their memory; the work stays AdamW's own.

    >>> from flopwise.spec.workload import workload
    >>> cost = account_step(workload("tiny", phase="backward"))
    >>> cost.flops("backward") == 2 * cost.flops("forward")       # naive attention would be exactly so
    False
    """
    if not isinstance(workload.subject, ModelSpec):
        raise FlopwiseError(
            f"{workload.target} is no model of flopwise's own, and only those are predicted from shapes",
            "give a preset or hf:PATH/config.json",
        )
    if optimizer_bits not in (8, 32):
        raise FlopwiseError(f"optimizer_bits = {optimizer_bits} is not allowed", "allowed: 8, 32")
    if workload.subject.n_layers > DEEPEST:
        raise FlopwiseError(
            f"n_layers = {workload.subject.n_layers} is too deep to account for op by op", f"allowed: up to {DEEPEST}"
        )
    _check_chunks(workload, workload.subject)
    return _Step(workload, gpu, optimizer_bits).run()


def _check_chunks(workload: Workload, model: ModelSpec) -> None:
    """A loss by chunks is gone through chunk by chunk: refuse one that would take minutes."""
    tokens, recipe = workload.batch * workload.context, workload.recipe
    if recipe.loss not in ("chunked", "fused") or workload.phase == "forward":
        return
    item = 4 if recipe.precision in ("fp32", "tf32") else 2
    fused = losses.fused_chunk(tokens, model.vocab, item, recipe.weights == "bf16")
    size = fused if recipe.loss == "fused" else losses.CHUNK_TOKENS
    if tokens > MOST_CHUNKS * size:
        raise FlopwiseError(
            f"loss = '{recipe.loss}': {tokens:,} tokens are too many chunks to account for one by one",
            f"allowed: up to {MOST_CHUNKS * size:,} tokens, --batch times --context",
        )


class _Step:
    """capture/model_step.py's ModelStep, on shapes."""

    def __init__(self, workload: Workload, gpu: Gpu | None, optimizer_bits: int) -> None:
        assert isinstance(workload.subject, ModelSpec)
        self.workload, self.recipe = workload, workload.recipe
        self.t = t = Tape()
        self.on_cpu = gpu is not None and gpu.name == "cpu"  # simulated as a GPU that needs no workspace
        gpu = None if self.on_cpu else gpu
        self.autocast = _AUTOCAST.get(self.recipe.precision, "")
        backend = sdpa_backend(self.recipe.attention, self.recipe.precision, gpu, workload.subject.head_dim)
        self.network = Network(
            t, workload.subject, self.recipe, workload.context, backend, architecture_of(gpu) == "hopper"
        )
        self.parameters = list(self.network.parameters.values())
        sizes = (workload.batch, workload.context)
        self.tokens = t.tensor(sizes, "int64", INPUTS, "tokens")
        self.targets = t.tensor(sizes, "int64", INPUTS, "targets")
        # One workspace for the thread that runs the forward pass, one for autograd's.
        threads = 1 if workload.phase == "forward" else 2
        unsplit = 0 if self.on_cpu else unsplit_bytes(p.weight.n_bytes for p in self.parameters)
        self.workspace = [t.tensor((unsplit,), "bool", WORKSPACE, "allocator")] if unsplit else []
        for _ in range(0 if self.on_cpu else threads):
            self.workspace.append(t.tensor((workspace_bytes(gpu),), "bool", WORKSPACE, "cublas"))
        self.state: list[Tensor] = []
        if workload.phase == "train":
            self.state = adamw.make_state(t, self.parameters, self.recipe, optimizer_bits == 8)
        overlapped = updates_in_backward(self.recipe)
        self.overlapped = UpdateInBackward(t, self.parameters, self.recipe) if overlapped else None
        self.output: Tensor | None = None
        self.loss: Tensor | None = None
        self.phases: list[PhaseMemory] = []
        self.kept: tuple[KeptTensors, ...] = ()

    def run(self) -> PredictedStep:
        t, moments = self.t, [self.t.footprint(START)]
        self._leave_last_step()
        if self.workload.phase == "forward":
            self._phase("forward", self._infer)
            moments.append(t.footprint(AFTER_FORWARD))
        else:
            self._phase("forward", self._forward)
            self._phase("loss", self._compute_loss)
            moments.append(t.footprint(AFTER_FORWARD))
            self.kept = _kept(t)
            self._phase("backward", self._backward)
            moments.append(t.footprint(AFTER_BACKWARD))
            if self.workload.phase == "train":
                self._phase("optimizer", self._update)
        top = max(self.phases, key=lambda phase: phase.peak_bytes)
        return PredictedStep(
            source=SHAPES,
            ops=tuple(t.ops),
            peak=Footprint(moment="peak", phase=top.phase, owners=top.owners),
            phases=tuple(self.phases),
            moments=tuple(moments),
            parameters=self.network.spec.parameters(),
            kept=self.kept,
            notes=(_ON_CPU,) if self.on_cpu else (),
        )

    def _leave_last_step(self) -> None:
        """What a step finds when it begins: the last one's gradients and loss, or its output."""
        t, spec = self.t, self.network.spec
        if self.workload.phase == "forward":
            shape = (self.workload.batch, self.workload.context, spec.vocab)
            self.output = t.tensor(shape, self.autocast or self.network.dtype, LOGITS, "mm")
            return
        for p in self.parameters if self.recipe.overlap == "off" else ():
            p.gradient = t.tensor(p.weight.shape, p.weight.dtype, GRADIENTS, p.name)
        self.loss = t.tensor((), "fp32", op="loss")

    def _phase(self, name: str, run: Callable[[], None]) -> None:
        t = self.t
        t.phase, start = name, t.live_bytes
        t.mark_peak()
        run()
        sizes = {"start_bytes": start, "peak_bytes": t.peak_bytes, "end_bytes": t.live_bytes, "reserved_bytes": 0}
        self.phases.append(PhaseMemory(phase=name, **sizes, owners=t.footprint("peak", at_peak=True).owners))

    def _infer(self) -> None:
        with self.t.no_grad(), self.t.casting_to(self.autocast):
            self.output = None
            self.output = self.network.logits(self.tokens)

    def _forward(self) -> None:
        for p in self.parameters:
            p.gradient = None
        self.loss = None
        with self.t.casting_to(self.autocast):
            whole = self.recipe.loss == "full"
            self.output = (self.network.logits if whole else self.network.hidden)(self.tokens)

    def _compute_loss(self) -> None:
        assert self.output is not None
        with self.t.casting_to(self.autocast), self.t.inside("loss"):
            if self.recipe.loss == "full":
                self.loss = losses.loss_full(self.t, self.output, self.targets)
            else:
                of_hidden = losses.loss_chunked if self.recipe.loss == "chunked" else losses.loss_fused
                weight, tf32 = self.network.head_weight, self.network.tf32
                self.loss = of_hidden(self.t, self.output, weight, self.targets, tf32)
        self.output = None

    def _backward(self) -> None:
        assert self.loss is not None
        if self.recipe.precision == "fp16":
            self.t.work("mul", (self.loss,), (self.loss,), "fp32")  # the loss scale
        self.t.backward(self.loss, self.t.run("ones_like", (), (), "fp32"))

    def _update(self) -> None:
        if self.overlapped is not None:
            return self.overlapped.finish()
        if self.recipe.precision == "fp16":  # fused optimizers unscale themselves, and still have gradients looked at
            adamw.unscale(self.t, self.parameters)
        adamw.step(self.t, self.parameters, self.recipe)
        if self.recipe.overlap == "on":  # all gradients came at the end, and are dropped like any
            for p in self.parameters:
                p.gradient = None
        return None


def _kept(t: Tape) -> tuple[KeptTensors, ...]:
    found = [
        KeptTensors(owner=owner, module=module, op=op, n_bytes=n)
        for (owner, module, op), n in t.live.items()
        if n and owner in (ACTIVATIONS, SCORES, LOGITS)
    ]
    return tuple(sorted(found, key=lambda kept: -kept.n_bytes))


def sdpa_backend(attention: str, precision: str, gpu: Gpu | None, head_dim: int = 64) -> str:
    """The kernel that runs fused attention: plain SDPA takes cuDNN's from Hopper on, flash before it, and for fp32 and
    before Ampere the memory-efficient one (on an H200 as measured with torch 2.11; a dry run says what else it depends on).

    >>> sdpa_backend("sdpa", "bf16", None), sdpa_backend("sdpa", "fp32", None), sdpa_backend("flex", "bf16", None)
    ('cudnn', 'efficient', 'flex')
    """
    if attention in ("sdpa-flash", "sdpa-cudnn"):
        return attention.removeprefix("sdpa-")
    if attention == "flex":
        return "flex"
    if attention == "flash":
        return "triton"  # flopwise's own
    half = precision not in ("fp32", "tf32")
    able = {
        "cudnn": half and head_dim % 8 == 0 and head_dim <= _WIDEST_HEAD["sdpa-cudnn"],
        "flash": half and head_dim <= _WIDEST_HEAD["sdpa-flash"],
        "efficient": True,
    }
    return next(one for one in architecture(architecture_of(gpu)).attention if able.get(one))


_WIDEST_HEAD = {"sdpa-flash": 256, "sdpa-cudnn": 128}


def check_attention(workload: Workload, gpu: Gpu | None = None) -> None:
    """Refuse what a GPU refuses, and a dry run too: a kernel of SDPA that was chosen and cannot run.

    >>> from flopwise.spec.workload import workload
    >>> check_attention(workload("tiny", attention="sdpa-flash", precision="bf16"))
    """
    spec, recipe = workload.subject, workload.recipe
    if not isinstance(spec, ModelSpec) or recipe.attention not in _WIDEST_HEAD:
        return
    backend = recipe.attention.removeprefix("sdpa-")
    if gpu is not None and backend not in architecture(architecture_of(gpu)).attention:
        raise Unsupported(f"{gpu.title} has no kernel for attention = '{recipe.attention}'", "try attention = sdpa")
    half = recipe.compute in ("bf16", "fp16")
    odd = recipe.attention == "sdpa-cudnn" and spec.head_dim % 8
    if not half or odd or spec.head_dim > _WIDEST_HEAD[recipe.attention]:
        raise Unsupported(
            f"attention = '{recipe.attention}' cannot run {recipe.compute} with head_dim {spec.head_dim} on a GPU",
            "try precision = bf16, or attention = sdpa, which picks a backend that can",
        )


def workspace_bytes(gpu: Gpu | None) -> int:
    """The BLAS library's workspace, as PyTorch sets it up.

    >>> workspace_bytes(None) // 2**20
    32
    """
    return architecture(architecture_of(gpu)).workspace_bytes
