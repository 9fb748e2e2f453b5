"""FLOPs, memory, what fits and how long it takes, before anything is run."""

from collections.abc import Sequence
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.predict.account import Account, Questions, account_for, account_of_step
from flopwise.predict.dry_step import dry_run, needs_dry_run, step_cost
from flopwise.predict.machine import find_ceilings
from flopwise.spec import fields, hf_config
from flopwise.spec.gpu import Gpu, gpu_names
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload, workload


def account(
    target: str | Workload,
    *,
    gpu: str | Sequence[str] = (),
    tokens: float | None = None,
    gpus: int = 1,
    mfu: float = 0.5,
    measured_ns: int | None = None,
    optimizer_bits: int = 32,
    inference: bool = False,
    **options: Any,
) -> Account:
    """What a step of a model must cost: FLOPs and bytes by module and op, memory by owner, and what follows for GPUs.

    `options` are the workload's size, phase and levers, as for `bench`. `tokens`, `gpus` and `mfu` give the days of a
    training run; `measured_ns`, a step's time, gives its MFU; `inference` adds prefill, decode and the KV cache.

    >>> import flopwise
    >>> flopwise.account("2.7B", gpu="h200").gpus[0].fits
    True
    """
    if inference and not isinstance(target, Workload) and options.get("phase") is None:
        options["phase"] = "forward"
    fields.whole("gpus", gpus, 1, 100_000_000)
    asked_for = target if isinstance(target, Workload) else workload(target, **options)
    if inference and asked_for.recipe.precision in ("bf16", "fp16"):  # no copies in fp32 beside: nothing is trained
        asked_for = msgspec.structs.replace(
            asked_for, recipe=msgspec.structs.replace(asked_for.recipe, precision="bf16-pure")
        )
    machines = _gpus(gpu)
    if not machines and (tokens is not None or measured_ns is not None):
        what = "days to train" if tokens is not None else "an MFU"
        raise FlopwiseError(f"{what} can be told only for a GPU", "add gpu, for example --gpu h100")
    questions = Questions(
        tokens=tokens, gpus=gpus, mfu=mfu, measured_ns=measured_ns, optimizer_bits=optimizer_bits, inference=inference
    )
    known = {one.name: found for one in machines if (found := find_ceilings(one))}
    of_file = _notes_of_file(asked_for)
    if not needs_dry_run(asked_for):
        told = account_for(asked_for, machines, questions, known)
        return msgspec.structs.replace(told, notes=told.notes + of_file)
    if tokens is not None or inference or optimizer_bits != 32:
        raise FlopwiseError(
            f"days to train, inference and 8-bit states can be told for flopwise's own models, not for {asked_for.target}",
            "leave these options out, or give a preset or hf:PATH/config.json",
        )
    run = dry_run(asked_for, machines[0] if machines else None)
    notes: tuple[str, ...] = (
        f"told by a dry run on fake tensors (torch {run.torch}, as on {run.architecture}): no arithmetic knows this step",
    )
    if len(machines) > 1:
        notes += (f"ops and memory are those of {machines[0].title}",)
    step = step_cost(run)
    return account_of_step(
        asked_for,
        step,
        machines,
        known,
        parameters=run.parameters,
        measured_ns=measured_ns,
        notes=notes + run.notes + of_file,
    )


def _notes_of_file(asked_for: Workload) -> tuple[str, ...]:
    if not asked_for.target.startswith("hf:"):
        return ()
    try:
        return hf_config.notes(asked_for.target.removeprefix("hf:"), asked_for.implementation != "transformers")
    except FlopwiseError:  # a workload of another day, whose file is gone
        return ()


def _gpus(names: str | Sequence[str]) -> tuple[Gpu, ...]:
    words = names.split(",") if isinstance(names, str) else names
    found = [gpu_named(word.strip()) for word in words if word.strip()]
    if words and not found:
        raise FlopwiseError(f"gpu = {fields.show(names)} names no GPU", f"known: {', '.join(gpu_names())}")
    return tuple({one.name: one for one in found}.values())  # each once
