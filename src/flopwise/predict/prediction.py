"""One door: `predict(workload, machine)` says what a step does, holds and takes, before it is run.

Behind it are two predictors. The shape simulator knows flopwise's own model, takes a fraction of a second and needs no torch. The
dry run knows any step: it runs the workload's code on fake tensors, in a process of its own that has torch.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from flopwise.capture.isolate import Worker
from flopwise.errors import FlopwiseError, Unsupported
from flopwise.predict.dry.architecture import architecture_of
from flopwise.predict.flops import ModelFlops, model_flops
from flopwise.predict.fusion import Graph, block_of, compiled_ops, repeated_blocks
from flopwise.predict.machine import Machine
from flopwise.predict.rank_memory import of_one_rank
from flopwise.predict.recorded.step import NEEDS_VALUES, RecordedStep, recorded_step, to_record, written_recipe
from flopwise.predict.shapes.overlap import updates_in_backward
from flopwise.predict.shapes.step import account_step, check_attention
from flopwise.predict.step_time import StepLimit, StepTime, step_limit, step_time
from flopwise.records.ceilings import Ceilings
from flopwise.records.memory import StoredPredictions
from flopwise.records.prediction import DryRun, MemoryPrediction, PredictedStep
from flopwise.spec.gpu import PEAK_DTYPES, Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.rank_share import rank_share
from flopwise.spec.recipe import FP8
from flopwise.spec.workload import UserStep, Workload, varied
from flopwise.work.operation import ATTENTION, OpWork

_SHALLOW = (4, 6)  # depths from which the peaks of deeper models are extrapolated


class Prediction(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One step of a workload on a machine: its operations, its memory by owner, its time by phase.

    >>> from flopwise.predict.machine import machine_with
    >>> from flopwise.spec.gpu import gpu
    >>> from flopwise.spec.workload import workload
    >>> found = predict(workload("tiny"), machine_with(gpu("h200")))
    >>> found.memory.peak.phase, [phase.phase for phase in found.time.phases]
    ('backward', ['forward', 'loss', 'backward', 'optimizer'])
    """

    workload: Workload
    machine: Machine
    step: PredictedStep  # as eager PyTorch runs it
    recorded: RecordedStep | None = None  # of a user's step as it is written: its levers follow from it

    @property
    def ops(self) -> tuple[OpWork, ...]:
        return self.step.ops

    @property
    def memory(self) -> MemoryPrediction:
        return self.step

    @cached_property
    def blocks(self) -> Graph:
        """What is compiled apart where a recipe says 'blocks'."""
        return block_of if self.model is not None else repeated_blocks(self.ops)

    @cached_property
    def kernels(self) -> Sequence[OpWork]:
        """What the GPU runs: a compiled step's operations are fused."""
        return compiled_ops(self.ops, self.workload.recipe.compile, self.blocks)

    @cached_property
    def time(self) -> StepTime | None:
        """The step's time; None where the machine's ceilings are not known."""
        return self.time_with(self.machine.ceilings) if self.machine.ceilings is not None else None

    def time_with(self, ceilings: Ceilings) -> StepTime:
        """The same step's time with other ceilings."""
        return step_time(self.workload.recipe, self.kernels, ceilings, self.blocks)

    @property
    def limit(self) -> StepLimit | None:
        """No faster than this by the GPU's datasheet; None where that says too little."""
        gpu = self.machine.gpu
        return step_limit(self.kernels, gpu, overlap=updates_in_backward(self.workload.recipe)) if gpu else None

    @property
    def model(self) -> ModelSpec | None:
        """The model, where its shapes are known: what fits, days to train and inference follow from them."""
        return rank_share(self.workload).own_model

    @property
    def model_flops(self) -> ModelFlops | None:
        """By formula, where the model is known; of one rank."""
        w = rank_share(self.workload)
        return model_flops(self.model, w.batch, w.context, w.phase) if self.model else None

    @property
    def useful_flops(self) -> float:
        """What the model asks for. Fused attention computes its scores again going back, a fifth of its FLOPs there."""
        if (known := self.model_flops) is not None:
            return known.total
        again = sum(op.flops for op in self.ops if op.kind == ATTENTION and op.phase == "backward") / 5
        return sum(op.flops for op in self.ops if op.phase != "recompute") - again

    @property
    def compute_dtype(self) -> str:
        """The precision in which most of the FLOPs are done: its peak is the one to reach."""
        by_dtype: dict[str, int] = {}
        for op in self.ops:
            by_dtype[op.dtype] = by_dtype.get(op.dtype, 0) + op.flops
        best = max(by_dtype, key=by_dtype.__getitem__, default="fp32")
        return best if best in PEAK_DTYPES else "fp32"


def predict(
    workload: Workload,
    machine: Machine | None = None,
    *,
    optimizer_bits: int = 32,
    recorded: RecordedStep | None = None,
) -> Prediction:
    """What one step of a workload does, holds and takes on a machine (else on a GPU like Hopper's, without a time).

    `optimizer_bits = 8`: moments kept in 8 bits, their memory alone. `recorded`: a user's step as it was dry-run before; its
    operations under this recipe follow from that at once, its memory does not.
    """
    if recorded is not None and workload.own_model is None:
        return Prediction(workload=workload, machine=machine or Machine(), step=recorded.under(workload))
    return predict_each(workload, (machine or Machine(),), optimizer_bits=optimizer_bits, levers=False)[0]


def predict_each(
    workload: Workload, machines: Sequence[Machine], *, optimizer_bits: int = 32, levers: bool = True
) -> list[Prediction]:
    """The same on several machines; what is alike on some of them is computed once. Of a step that ranks share, one rank's.

    `levers`: a user's step is recorded, too, so that what each lever saves follows from it.
    """
    gpus = {_kind(machine): machine.gpu for machine in machines}
    share = rank_share(workload)
    if optimizer_bits != 32:
        known_model(workload, "8-bit optimizer states")
    for machine in machines:
        check_fp8(workload, machine.gpu)
    if workload.own_model is not None:
        for machine in machines:
            if not machine.is_cpu:
                check_attention(share, machine.gpu)
        steps = {kind: of_one_rank(account_step(share, gpu, optimizer_bits), workload) for kind, gpu in gpus.items()}
    else:
        return _predict_user_step(workload, machines, gpus, levers)
    return [Prediction(workload=workload, machine=one, step=steps[_kind(one)]) for one in machines]


def check_fp8(workload: Workload, gpu: Gpu | None) -> None:
    """Raise if the workload asks for fp8 and a known GPU has none."""
    if workload.recipe.precision in FP8 and gpu is not None and not gpu.peak("fp8"):
        raise Unsupported(f"{gpu.title} has no fp8", "allowed there: precision = bf16-master; or --gpu h200")


def check_dry_run(workload: Workload) -> None:
    """Raise if a user's step has a lever that a dry run cannot put in place: its memory then cannot be told."""
    for lever in derived_levers(workload):
        message = f"{lever} = '{getattr(workload.recipe, lever)}' needs values, and a dry run has none"
        raise Unsupported(message, "run it: omit --predict")


def derived_levers(workload: Workload) -> dict[str, Any]:
    """The levers of a user's step that a dry run cannot put in place, with what the code does without them."""
    if not isinstance(workload.subject, UserStep):
        return {}
    written, asked = written_recipe(workload), workload.recipe
    return {name: getattr(written, name) for name in NEEDS_VALUES if getattr(asked, name) != getattr(written, name)}


def _predict_user_step(
    workload: Workload, machines: Sequence[Machine], gpus: dict[str, Gpu | None], levers: bool
) -> list[Prediction]:
    """By a dry run; for a GPU also as it is written, and that in bf16: its levers follow from these two."""
    written = varied(workload, recipe=written_recipe(workload))
    derived = derived_levers(workload)
    run = varied(workload, **derived)
    records = levers and any(one.gpu and not one.is_cpu for one in machines)
    wanted = [run, written, varied(written, precision="bf16")] if records else [run]
    found = {}
    with Worker() as worker:
        for kind, gpu in gpus.items():
            first, *others = _each_once(worker, wanted, gpu)
            assert first is not None
            step = RecordedStep(as_written=first).under(workload, run.recipe) if derived else first
            if derived:
                said = (
                    f"memory is that of the step without {' and '.join(derived)}, which a dry run cannot put in place"
                )
                step = msgspec.structs.replace(step, notes=(*step.notes, said))
            found[kind] = step, _with_bf16(*others) if others else None
    return [
        Prediction(workload=workload, machine=one, step=found[_kind(one)][0], recorded=found[_kind(one)][1])
        for one in machines
    ]


def _each_once(worker: Worker, wanted: list[Workload], gpu: Gpu | None) -> list[DryRun | None]:
    asked = [one for place, one in enumerate(wanted) if one not in wanted[:place]]
    runs = worker.dry_runs(asked, architecture_of(gpu))
    return [runs[asked.index(one)] for one in wanted]


def _with_bf16(plain: DryRun | None, bf16: DryRun | None) -> RecordedStep | None:
    return RecordedStep(as_written=plain, cast={"bf16": bf16} if bf16 else {}) if plain else None


def record_step(worker: Worker, workload: Workload, gpu: Gpu | None, allow: Sequence[str] = ()) -> RecordedStep | None:
    """A user's step on fake tensors, as written and cast otherwise, in one process of the worker; None where it cannot be."""
    try:
        asked = to_record(workload, allow)
        return recorded_step(asked, worker.dry_runs(asked, architecture_of(gpu)))
    except FlopwiseError:
        return None


def _kind(machine: Machine) -> str:
    return (machine.gpu.capability or machine.gpu.name) if machine.gpu is not None else ""


def predict_quickly(workload: Workload, machine: Machine | None = None) -> Prediction | None:
    """The prediction, if it can be had at once and without torch; None: it cannot, or there is none."""
    if workload.own_model is None:
        return None
    try:
        return predict(workload, machine)
    except FlopwiseError:  # too deep to go through op by op
        return None


def known_model(workload: Workload, what: str) -> ModelSpec:
    """The model, where its shapes are known; `what` needs them, and is refused for other code."""
    if workload.own_model is None:
        step = f"phase = {workload.phase}" if workload.generates else workload.target
        raise FlopwiseError(
            f"{what} can be predicted for whole steps of flopwise's own models, not for {step}",
            "omit these options, or give a preset or hf:PATH/config.json",
        )
    return workload.own_model


def predict_memory(worker: Worker, workload: Workload, gpu: Gpu | None) -> StoredPredictions:
    """Both predictions of a step's memory, where there are both; what could not be predicted is a note."""
    found, notes = memory_from_shapes(workload, gpu), tuple[str, ...]()
    if workload.many:  # a dry run has one process
        return StoredPredictions(predictions=found)
    try:
        found = (worker.dry_run(workload, architecture_of(gpu)).memory(), *found)
    except FlopwiseError as error:
        notes = (f"no dry run: {error.message}",)
    return StoredPredictions(predictions=found, notes=notes)


def memory_from_shapes(workload: Workload, gpu: Gpu | None) -> tuple[MemoryPrediction, ...]:
    """The shape simulator's prediction of a step's memory; none for a step that it does not know."""
    if workload.own_model is None:
        return ()
    return (of_one_rank(account_step(rank_share(workload), gpu), workload).memory(),)


def peak_bytes(workload: Workload, gpu: Gpu | None = None, optimizer_bits: int = 32) -> int | None:
    """The peak of a step's memory, at once; None where it takes a dry run, or a step is too large to go through.

    A deep model's follows from two shallow ones, since every layer adds the same bytes to each phase's peak.

    >>> from flopwise.spec.workload import workload
    >>> peak_bytes(workload("tiny", precision="bf16-pure")) < peak_bytes(workload("tiny"))
    True
    """
    shared, workload = workload, rank_share(workload)
    try:
        if workload.own_model is None:
            return None
        if shared.recipe.parallel != "off":
            return of_one_rank(account_step(workload, gpu, optimizer_bits), shared).peak_bytes
        return _peak_bytes(workload, workload.own_model, gpu, optimizer_bits)
    except FlopwiseError:
        return None


def _peak_bytes(workload: Workload, spec: ModelSpec, gpu: Gpu | None, optimizer_bits: int) -> int:
    every = max(1, workload.recipe.checkpoint)
    few, more = (n * every + spec.n_layers % every for n in _SHALLOW)  # the same rest in a checkpoint's last segment
    if spec.n_layers <= more + every:
        return account_step(workload, gpu, optimizer_bits).peak_bytes
    shallow: list[list[int]] = []
    for n_layers in (few, more):
        shorter = msgspec.structs.replace(workload, subject=msgspec.structs.replace(spec, n_layers=n_layers))
        shallow.append([phase.peak_bytes for phase in account_step(shorter, gpu, optimizer_bits).phases])
    steps = (spec.n_layers - more) / (more - few)
    return max(round(b + steps * (b - a)) for a, b in zip(shallow[0], shallow[1], strict=True))
