"""A workload accounted for: its work and memory by module and owner, and what they mean on each GPU."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from flopwise import units
from flopwise.predict import fit
from flopwise.predict.constants import OVERLAP_SHARE
from flopwise.predict.flops import ModelFlops, TrainingTime, flops_per_token, mfu, training_time
from flopwise.predict.inference import Inference, InferenceLimit, inference, inference_limit
from flopwise.predict.machine import Machine
from flopwise.predict.plain_levers import LeverSaving, recorded_levers
from flopwise.predict.prediction import Prediction, known_model, predict_each
from flopwise.predict.shapes.memory import without_layer
from flopwise.predict.shapes.network import weight_shapes
from flopwise.predict.shapes.overlap import updates_in_backward
from flopwise.predict.step_time import StepLimit, StepTime
from flopwise.records.prediction import PredictedStep
from flopwise.records.printed import Printed
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import REPLAYED
from flopwise.spec.workload import Workload
from flopwise.work.operation import ATTENTION, MATMUL, PART, OpWork

# Words in the names of ops that compute more than their elements, and of which no formula is known here.
_UNCOUNTED = (
    *("rnn", "lstm", "gru", "fft", "linalg", "svd", "cholesky", "solve"),
    *("conv_tbc", "cdist", "bilinear", "transformer_encoder"),
)


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked besides the step itself."""

    tokens: float | None = None  # to train on
    gpus: int = 1
    mfu: float = 0.5  # that training reaches
    measured_ns: int | None = None  # a step's time
    optimizer_bits: int = 32
    inference: bool = False


class WorkRow(msgspec.Struct, frozen=True, kw_only=True):
    """One module's ops of one class, of all layers, in one step."""

    module: str
    kind: str
    forward_flops: int = 0  # with the loss
    backward_flops: int = 0  # with what is computed again
    read_bytes: int = 0
    write_bytes: int = 0
    kernels: int = 0
    element_flops: int = 0  # of ops without a matmul, one an element, as in a roofline; in no total and no MFU

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved: matmuls' where there are any."""
        return (self.flops or self.element_flops) / self.moved_bytes if self.moved_bytes else 0.0


class ParameterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One module's parameters, of all layers."""

    module: str
    parameters: int
    share: float


class GpuAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The step on one kind of GPU."""

    gpu: Gpu
    step: PredictedStep  # with this GPU's attention kernel and workspace
    fits: bool | None  # None: the GPU states no memory
    largest_batch: int | None  # this and what follows: None where the model, or the GPU's memory, is not known
    largest_context: int | None
    largest_model: int | None  # parameters whose weights, gradients and state alone fill it
    limit: StepLimit | None  # from the datasheet
    mfu_at_limit: float | None
    mfu_measured: float | None
    time: StepTime | None = None  # predicted, where ceilings are known
    mfu_predicted: float | None = None
    ceilings: str = ""  # where those of `time` come from
    training: tuple[TrainingTime, ...] = ()  # by the rule of six, and with attention
    inference: tuple[InferenceLimit, ...] = ()
    useful_flops: float = 0.0
    compute_dtype: str = "fp32"  # of most FLOPs
    levers: tuple[LeverSaving, ...] = ()  # of a user's step; of flopwise's own models they are predicted when shown


class Account(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """A workload, accounted for before it is run."""

    workload: Workload
    spec: ModelSpec | None  # None: not flopwise's own model
    parameters: int
    parameter_rows: tuple[ParameterRow, ...]
    flops: ModelFlops | None
    step: PredictedStep
    rows: tuple[WorkRow, ...]
    optimizer_bits: int
    measured_ns: int | None = None
    gpus: tuple[GpuAccount, ...] = ()
    inference: Inference | None = None
    notes: tuple[str, ...] = ()

    def headline(self) -> str:
        return self.workload.label()


def account_for(workload: Workload, machines: Sequence[Machine] = (), asked: Questions | None = None) -> Account:
    """The account of a workload; the step is that on the first machine, where there is one.

    >>> from flopwise.spec.workload import workload
    >>> account_for(workload("2.7B")).parameters
    3406809600
    """
    asked = asked or Questions()
    if asked.tokens is not None or asked.inference:
        known_model(workload, "days to train and inference")
    return account_of(predict_each(workload, machines or (Machine(),), optimizer_bits=asked.optimizer_bits), asked)


def account_of(predictions: Sequence[Prediction], asked: Questions | None = None) -> Account:
    """The account of one workload's predictions, one for each machine."""
    first, asked = predictions[0], asked or Questions()
    w, spec, step = first.workload, first.model, first.step
    served = inference(spec, w.batch, w.context, w.recipe) if spec and asked.inference else None
    return Account(
        workload=w,
        spec=spec,
        parameters=step.parameters,
        parameter_rows=parameters_by_module(spec, w.recipe.projections) if spec else (),
        flops=first.model_flops,
        step=step,
        rows=by_module(step.ops),
        optimizer_bits=asked.optimizer_bits,
        measured_ns=asked.measured_ns,
        gpus=tuple(_on_gpu(one, asked, served) for one in predictions if one.machine.gpu is not None),
        inference=served,
        notes=_notes(first, asked.optimizer_bits),
    )


def _on_gpu(found: Prediction, asked: Questions, served: Inference | None) -> GpuAccount:
    w, gpu, flops = found.workload, found.machine.gpu, found.model_flops
    assert gpu is not None
    memory, peak, limit, time = gpu.memory_bytes, gpu.peak(found.compute_dtype), found.limit, found.time
    cache = served.kv_cache_bytes if served else 0

    def share(of: float | None, seconds: float | None) -> float | None:
        return mfu(of, seconds, peak) if of is not None and seconds is not None and peak else None

    at_limit = None  # counted as in the limit
    if flops is not None:
        at_limit = flops.total if w.recipe.attention == "naive" else flops.causal
    batch, context, model = _largest(found, asked, served)
    ceilings = found.machine.ceilings
    return GpuAccount(
        gpu=gpu,
        step=found.step,
        fits=None if memory is None else found.step.peak_bytes + cache <= memory,
        largest_batch=batch,
        largest_context=context,
        largest_model=model,
        limit=limit,
        mfu_at_limit=share(at_limit, limit.seconds if limit else None),
        mfu_measured=share(found.useful_flops, None if asked.measured_ns is None else asked.measured_ns / 1e9),
        time=time,
        mfu_predicted=share(found.useful_flops, time.wall_ns / 1e9 if time and time.wall_ns else None),
        ceilings=ceilings.describe() if ceilings else "",
        training=_training(found, asked),
        inference=_inference_limits(gpu, served, found.compute_dtype),
        useful_flops=found.useful_flops,
        compute_dtype=found.compute_dtype,
        levers=recorded_levers(found),
    )


def _largest(
    found: Prediction, asked: Questions, served: Inference | None
) -> tuple[int | None, int | None, int | None]:
    """The largest batch, context and model: of a step; of inference, with a full cache besides."""
    w, gpu, bits = found.workload, found.machine.gpu, asked.optimizer_bits
    if gpu is None or gpu.memory_bytes is None or found.model is None:
        return None, None, None
    cached = served.kv_cache_bytes_per_token if served else 0
    return (
        fit.largest_batch(w, gpu.memory_bytes, gpu, bits, cached),
        fit.largest_context(w, gpu.memory_bytes, gpu, bits, cached),
        fit.largest_model(gpu.memory_bytes * asked.gpus, fit.bytes_per_parameter(w.recipe, w.phase, bits)),
    )


def _training(found: Prediction, asked: Questions) -> tuple[TrainingTime, ...]:
    """In the workload's precision, and in bf16, in which models are trained."""
    gpu, spec = found.machine.gpu, found.model
    if asked.tokens is None or gpu is None or spec is None:
        return ()
    peaks = {dtype: peak for dtype in dict.fromkeys((found.compute_dtype, "bf16")) if (peak := gpu.peak(dtype))}
    return tuple(
        training_time(spec.parameters(), asked.tokens, asked.gpus, peak, asked.mfu, flops, dtype)
        for dtype, peak in peaks.items()
        for flops in (None, flops_per_token(spec, found.workload.context))
    )


def _inference_limits(gpu: Gpu, served: Inference | None, dtype: str) -> tuple[InferenceLimit, ...]:
    parts = (served.prefill, served.decode) if served else ()
    return tuple(limit for part in parts if (limit := inference_limit(part, gpu, dtype)) is not None)


def _notes(found: Prediction, bits: int) -> tuple[str, ...]:
    recipe, spec = found.workload.recipe, found.model
    notes = [found.step.how(), name_note(spec) if spec else "", *found.step.notes]
    if bits != 32 and found.workload.phase == "train":
        notes.append(f"{bits}-bit optimizer states are counted in memory; bytes moved and time are those of 32 bits")
    if spec and recipe.checkpoint > spec.n_layers:
        notes.append(f"checkpoint = {recipe.checkpoint} is more than the {spec.n_layers} layers: one segment of all")
    if recipe.overlap == "on":
        hidden = "none"
        if updates_in_backward(recipe):
            hidden = f"{OVERLAP_SHARE:g} × what fits beside backward's compute-bound kernels"
        notes.append(f"overlap = 'on': of the optimizer's time, {hidden} is taken as hidden, as once measured")
    if spec and recipe.compile != "off":
        notes.append(
            f"compile = '{recipe.compile}': ops, bytes and memory are eager PyTorch's, an upper limit; "
            "least and predicted time are those of the fused kernels"
        )
    if recipe.compile == REPLAYED:
        notes.append(
            f"compile = '{REPLAYED}': between steps its CUDA graphs keep the memory that they were recorded in"
        )
    return tuple(note for note in (*notes, uncounted(found.ops)) if note)


def uncounted(ops: Sequence[OpWork]) -> str:
    """A note that names operations whose FLOPs are not counted; or ''."""
    names = sorted({op.op for op in ops if not op.flops and op.kernels and _multiplies(op)})
    return f"the FLOPs of {', '.join(names)} are not counted: no formula is known for them here" if names else ""


def _multiplies(op: OpWork) -> bool:
    if op.kind in (MATMUL, ATTENTION):
        return not op.op.startswith(PART) and all(0 not in shape for shape in op.shapes)  # nothing has nothing to count
    return any(word in op.op for word in _UNCOUNTED)


def by_module(ops: Iterable[OpWork]) -> tuple[WorkRow, ...]:
    """The ops added up by module and class, in the order in which the step first comes to them.

    >>> op = OpWork(op="mm", module="blocks.0.mlp.up", phase="forward", kind="matmul", dtype="bf16", flops=8)
    >>> by_module([op, msgspec.structs.replace(op, module="blocks.1.mlp.up", phase="backward")])[0].flops
    16
    """
    rows: dict[tuple[str, str], list[int]] = {}
    for op in ops:
        module = "optimizer" if op.phase == "optimizer" else without_layer(op.module) or "model"
        row = rows.setdefault((module, op.kind), [0, 0, 0, 0, 0, 0])
        row[0 if op.phase in ("forward", "loss") else 1] += op.flops
        elements = op.elements if op.kernels and not op.flops else 0
        for i, value in enumerate((op.read_bytes, op.write_bytes, op.kernels, elements), 2):
            row[i] += value
    return tuple(
        WorkRow(module=module, kind=kind, **dict(zip(WorkRow.__struct_fields__[2:], row, strict=True)))
        for (module, kind), row in rows.items()
    )


def total_row(rows: Iterable[WorkRow]) -> WorkRow:
    """All rows in one."""
    names, some = WorkRow.__struct_fields__[2:], list(rows)
    return WorkRow(module="all", kind="", **{name: sum(getattr(row, name) for row in some) for name in names})


def parameters_by_module(spec: ModelSpec, projections: str = "separate") -> tuple[ParameterRow, ...]:
    """Where the parameters are; a shared one counts once.

    >>> from flopwise.spec.model import preset
    >>> sum(row.parameters for row in parameters_by_module(preset("gpt2"))) == preset("gpt2").parameters()
    True
    """
    counts: dict[str, int] = {}
    for name, shape in weight_shapes(spec, projections).items():
        module = without_layer(name.rpartition(".")[0])
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        counts[module] = counts.get(module, 0) + size
    whole = sum(counts.values())
    return tuple(ParameterRow(module=m, parameters=n, share=n / whole) for m, n in counts.items())


def name_note(spec: ModelSpec) -> str:
    """What to say of a name that states another size than the model has; empty where it is near enough.

    >>> from flopwise.spec.model import preset
    >>> name_note(preset("2.7B"))
    "'2.7B' has 3.407B parameters (its SwiGLU MLP has three matrices of d_model × d_ff)"
    >>> name_note(preset("llama3-8b"))
    ''
    """
    stated = re.search(r"(\d+(?:\.\d+)?)b$", spec.name.lower())
    count = spec.parameters()
    if stated is None or abs(count / (float(stated[1]) * 1e9) - 1) < 0.05:
        return ""
    why = " (its SwiGLU MLP has three matrices of d_model × d_ff)" if spec.mlp == "swiglu" else ""
    return f"'{spec.name}' has {units.significant(count / 1e9, 4)}B parameters{why}"
