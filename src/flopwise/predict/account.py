"""A workload accounted for: what its step does and holds, and what that means on each GPU."""

from collections.abc import Mapping, Sequence

import msgspec

from flopwise.predict import fit
from flopwise.predict.flops import ModelFlops, mfu, model_flops
from flopwise.predict.fusion import block_of, fuse, graph_of
from flopwise.predict.inference import Inference, InferenceLimit, inference, limit
from flopwise.predict.limits import StepLimit, step_limit
from flopwise.predict.roofline import BESIDE, StepTime, predict
from flopwise.predict.shapes.overlap import updates_in_backward
from flopwise.predict.shapes.step import StepCost, account_step, check_attention
from flopwise.predict.summary import ParameterRow, WorkRow, by_module, name_note, parameters_by_module
from flopwise.predict.training import TrainingTime, flops_per_token, training_time
from flopwise.records.ceilings import Ceilings
from flopwise.spec.gpu import DTYPES, Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload
from flopwise.work.operation import ATTENTION, MATMUL, OpWork

_LEAST_CALL_NS = 40_000.0  # the host's, of a compiled graph however small: guards, wrappers, the way into autograd
_MORE_THAN_ELEMENTWISE = (
    "rnn",
    "lstm",
    "gru",
    "fft",
    "linalg",
    "svd",
    "cholesky",
    "solve",
    "conv_tbc",
    "cdist",
    "bilinear",
    "transformer_encoder",
)


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked beside the step itself."""

    tokens: float | None = None  # to train on
    gpus: int = 1
    mfu: float = 0.5  # that training reaches
    measured_ns: int | None = None  # a step's time
    optimizer_bits: int = 32
    inference: bool = False


class GpuAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The step on one kind of GPU."""

    gpu: Gpu
    step: StepCost  # with this GPU's attention kernel and workspace
    fits: bool | None  # None: the GPU states no memory
    largest_batch: int | None
    largest_context: int | None
    largest_model: int | None  # parameters whose weights, gradients and state alone fill it
    limit: StepLimit | None  # from the datasheet; a prediction needs measured ceilings
    mfu_at_limit: float | None
    mfu_measured: float | None
    time: StepTime | None = None  # predicted, where ceilings are known
    mfu_predicted: float | None = None
    ceilings: str = ""  # where those of `time` come from
    training: tuple[TrainingTime, ...] = ()  # by the rule of six, and with attention
    inference: tuple[InferenceLimit, ...] = ()


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A workload, accounted for by arithmetic: nothing was run."""

    workload: Workload
    spec: ModelSpec | None  # None: not flopwise's own model, but a step that was run dry
    parameters: int
    parameter_rows: tuple[ParameterRow, ...]
    flops: ModelFlops | None
    step: StepCost
    rows: tuple[WorkRow, ...]
    optimizer_bits: int
    measured_ns: int | None = None
    gpus: tuple[GpuAccount, ...] = ()
    inference: Inference | None = None
    notes: tuple[str, ...] = ()


def account_for(
    workload: Workload,
    gpus: tuple[Gpu, ...] = (),
    asked: Questions | None = None,
    ceilings: Mapping[str, Ceilings] | None = None,
) -> Account:
    """The account of a model's workload; the step is the first GPU's, where there is one.

    `ceilings`, by the GPU's name, predict how long the step takes.

    >>> from flopwise.spec.workload import workload
    >>> account_for(workload("2.7B")).parameters
    3406809600
    """
    asked = asked or Questions()
    if not gpus or any(one.name != "cpu" for one in gpus):
        check_attention(workload)
    step = account_step(workload, gpus[0] if gpus else None, asked.optimizer_bits)
    spec = workload.subject
    assert isinstance(spec, ModelSpec)  # account_step has said so otherwise
    ask = _Ask(workload, spec, asked, ceilings or {})
    return Account(
        workload=workload,
        spec=spec,
        parameters=spec.parameters(),
        parameter_rows=parameters_by_module(spec, workload.recipe.projections),
        flops=model_flops(spec, workload.batch, workload.context, workload.phase),
        step=step,
        rows=by_module(step.ops),
        optimizer_bits=asked.optimizer_bits,
        measured_ns=asked.measured_ns,
        gpus=tuple(ask.on(one, step if one is gpus[0] else None) for one in gpus),
        inference=ask.inference,
        notes=_notes(workload, spec, asked.optimizer_bits),
    )


def account_of_step(
    workload: Workload,
    step: StepCost,
    gpus: tuple[Gpu, ...],
    ceilings: Mapping[str, Ceilings],
    *,
    parameters: int = 0,
    measured_ns: int | None = None,
    notes: tuple[str, ...] = (),
) -> Account:
    """The account of a step of which no spec is known, only what it does: what fits beside it cannot be told."""
    flops, seconds, dtype = _model_flops(step.ops), (measured_ns or 0) / 1e9, _matmul_dtype(step.ops)
    running, accounts = _running(workload, step), []
    for one in gpus:
        floor, peak = step_limit(running, one, overlap=updates_in_backward(workload.recipe)), one.peak(dtype)
        time = step_time(workload, step, ceilings[one.name]) if one.name in ceilings else None
        accounts.append(
            GpuAccount(
                gpu=one,
                step=step,
                fits=None if one.memory_bytes is None else step.peak_bytes <= one.memory_bytes,
                largest_batch=None,
                largest_context=None,
                largest_model=None,
                limit=floor,
                mfu_at_limit=None,
                mfu_measured=mfu(flops, seconds, peak) if seconds and peak else None,
                time=time,
                mfu_predicted=mfu(flops, time.wall_ns / 1e9, peak) if time and time.wall_ns and peak else None,
                ceilings=ceilings[one.name].told() if time else "",
            )
        )
    return Account(
        workload=workload,
        spec=None,
        parameters=parameters,
        parameter_rows=(),
        flops=None,
        step=step,
        rows=by_module(step.ops),
        optimizer_bits=32,
        measured_ns=measured_ns,
        gpus=tuple(accounts),
        notes=notes + _uncounted(step.ops),
    )


def _model_flops(ops: Sequence[OpWork]) -> float:
    """What the model asks for: fused attention computes its scores again going back, a fifth of its FLOPs there."""
    again = sum(op.flops for op in ops if op.kind == ATTENTION and op.phase == "backward") / 5
    return sum(op.flops for op in ops if op.phase != "recompute") - again


def _matmul_dtype(ops: Sequence[OpWork]) -> str:
    """The precision in which most of the FLOPs are done: whose peak is the one to reach."""
    by_dtype: dict[str, int] = {}
    for op in ops:
        by_dtype[op.dtype] = by_dtype.get(op.dtype, 0) + op.flops
    best = max(by_dtype, key=by_dtype.__getitem__, default="fp32")
    return best if best in DTYPES else "fp32"


def _uncounted(ops: Sequence[OpWork]) -> tuple[str, ...]:
    """A note on operations that compute more than their elements, and of which nobody counts the FLOPs."""
    names = sorted({op.op for op in ops if not op.flops and op.kernels and _multiplies(op)})
    return (f"the FLOPs of {', '.join(names)} are not counted: no formula is known for them here",) if names else ()


def _multiplies(op: OpWork) -> bool:
    if op.kind in (MATMUL, ATTENTION):
        return not any(0 in shape for shape in op.shapes)  # of nothing there is nothing to count
    return any(word in op.op for word in _MORE_THAN_ELEMENTWISE)


def step_time(workload: Workload, step: StepCost, ceilings: Ceilings) -> StepTime:
    """How long the step takes on a machine with these ceilings; compiled, its operations are fused first."""
    lever, graph, overlap = workload.recipe.compile, workload.recipe.graph == "on", updates_in_backward(workload.recipe)
    if lever == "off":
        return predict(step.ops, ceilings, graph=graph, overlap=overlap)
    ops = _running(workload, step)
    if lever == "blocks":
        return predict(ops, ceilings, graph=graph, calls=None if graph else _calls(ops, ceilings), overlap=overlap)
    return predict(ops, ceilings, graph=graph, compiled=() if graph else ("forward", "loss", "backward"))


def _running(workload: Workload, step: StepCost) -> Sequence[OpWork]:
    """What the GPU runs: a compiled step's kernels are fused."""
    lever = workload.recipe.compile
    return step.ops if lever == "off" else fuse(step.ops, graph_of(lever))


def _calls(ops: Sequence[OpWork], ceilings: Ceilings) -> dict[int, float]:
    """By the place of the first operation of each compiled block, in every phase: the host's work for calling it.

    A call's time goes with the tensors it checks and hands over, and is `_LEAST_CALL_NS` at the least. Without a
    measurement of that, the blocks share what one call for all of them takes.
    """
    graphs = [(block_of(op), op.phase) for op in ops]
    per_phase = {phase: len({graph for graph, of in graphs if of == phase and graph}) for _, phase in graphs}
    tensors: dict[tuple[str | None, str], set[int]] = {}
    for op, call in zip(ops, graphs, strict=True):
        tensors.setdefault(call, set()).update(tensor for tensor, _ in op.reads)
    found: dict[int, float] = {}
    called: set[tuple[str | None, str]] = set()
    for place, call in enumerate(graphs):
        if call[0] is None or call[1] == "optimizer" or call in called:
            continue
        called.add(call)
        cost = ceilings.compiled.get(call[1]) or ceilings.compiled.get("forward")
        call_ns = cost.listed_ns * len(tensors[call]) if cost else ceilings.compiled_call_ns / per_phase[call[1]]
        found[place] = max(_LEAST_CALL_NS, call_ns)
    return found


class _Ask:
    """The questions, put to every GPU."""

    def __init__(self, workload: Workload, spec: ModelSpec, asked: Questions, ceilings: Mapping[str, Ceilings]) -> None:
        self.workload, self.spec, self.asked, self.ceilings = workload, spec, asked, ceilings
        precision = workload.recipe.precision
        self.dtype = workload.recipe.compute
        sizes = (workload.batch, workload.context)
        self.inference = inference(spec, *sizes, precision) if asked.inference else None
        flops = model_flops(spec, *sizes, workload.phase)
        self.flops = flops.total
        self.flops_at_limit = (
            flops.total if workload.recipe.attention == "naive" else flops.causal
        )  # as the limit has it

    def on(self, one: Gpu, step: StepCost | None) -> GpuAccount:
        w, bits = self.workload, self.asked.optimizer_bits
        step = step or account_step(w, one, bits)
        memory, peak = one.memory_bytes, one.peak(self.dtype)
        floor = step_limit(_running(w, step), one, overlap=updates_in_backward(w.recipe))
        per_parameter = fit.bytes_per_parameter(w.recipe, w.phase, bits)
        time = step_time(w, step, self.ceilings[one.name]) if one.name in self.ceilings else None
        seconds = None if self.asked.measured_ns is None else self.asked.measured_ns / 1e9
        cache = self.inference.kv_cache_bytes if self.inference else 0
        batch, context = self._largest(one, memory)
        return GpuAccount(
            gpu=one,
            step=step,
            fits=None if memory is None else step.peak_bytes + cache <= memory,
            largest_batch=batch,
            largest_context=context,
            largest_model=None if memory is None else fit.largest_model(memory * self.asked.gpus, per_parameter),
            limit=floor,
            mfu_at_limit=mfu(self.flops_at_limit, floor.seconds, peak) if floor and peak else None,
            mfu_measured=mfu(self.flops, seconds, peak) if seconds is not None and peak else None,
            time=time,
            mfu_predicted=mfu(self.flops, time.wall_ns / 1e9, peak) if time and peak else None,
            ceilings=self.ceilings[one.name].told() if time else "",
            training=self._training(one),
            inference=self._inference(one),
        )

    def _largest(self, one: Gpu, memory: int | None) -> tuple[int | None, int | None]:
        """The largest batch and context: of a step; of inference, with a full cache beside it."""
        w, bits = self.workload, self.asked.optimizer_bits
        if memory is None:
            return None, None
        cached = self.inference.kv_cache_bytes_per_token if self.inference else 0
        return fit.largest_batch(w, memory, one, bits, cached), fit.largest_context(w, memory, one, bits, cached)

    def _training(self, one: Gpu) -> tuple[TrainingTime, ...]:
        """In the workload's precision, and in bf16, in which models are trained."""
        asked = self.asked
        if asked.tokens is None:
            return ()
        counted = flops_per_token(self.spec, self.workload.context)
        peaks = {dtype: peak for dtype in dict.fromkeys((self.dtype, "bf16")) if (peak := one.peak(dtype))}
        return tuple(
            training_time(self.spec.parameters(), asked.tokens, asked.gpus, peak, asked.mfu, flops, dtype)
            for dtype, peak in peaks.items()
            for flops in (None, counted)
        )

    def _inference(self, one: Gpu) -> tuple[InferenceLimit, ...]:
        if self.inference is None:
            return ()
        precision = self.workload.recipe.precision
        found = [limit(part, one, precision) for part in (self.inference.prefill, self.inference.decode)]
        return tuple(one for one in found if one is not None)


def _notes(w: Workload, spec: ModelSpec, bits: int) -> tuple[str, ...]:
    notes = [note for note in (name_note(spec),) if note]
    if w.implementation == "transformers":
        notes.append("counted for flopwise's own model of this shape, not for transformers' code")
    if bits != 32 and w.phase == "train":
        notes.append(f"{bits}-bit optimizer states are counted in memory; bytes moved and time are those of 32 bits")
    if w.recipe.checkpoint > spec.n_layers:
        notes.append(f"checkpoint = {w.recipe.checkpoint} is more than the {spec.n_layers} layers: one segment of all")
    if w.recipe.overlap == "on":
        hidden = (
            f"{BESIDE:g} × what fits beside backward's compute-bound kernels"
            if updates_in_backward(w.recipe)
            else "none"
        )
        notes.append(f"overlap = 'on': of the optimizer's time, {hidden} is taken as hidden, as once measured")
    if w.recipe.compile != "off":
        notes.append(
            f"compile = '{w.recipe.compile}': ops, bytes and memory are eager PyTorch's, an upper limit; "
            "least and predicted time are those of the fused kernels"
        )
    return tuple(notes)
