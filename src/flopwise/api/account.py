"""FLOPs, memory, what fits and how long it takes, before anything is run."""

from collections.abc import Sequence
from typing import Any

import msgspec

from flopwise import units
from flopwise.capture.functions import Target, as_workload
from flopwise.errors import FlopwiseError
from flopwise.predict.account import Account, Questions, account_for
from flopwise.predict.exchanges import exchange_ns, exchanged
from flopwise.predict.flops import TrainingTime, training_time
from flopwise.predict.machine import machine_with
from flopwise.spec import fields, hf_config
from flopwise.spec.gpu import Gpu, gpu_names
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload


def account(
    target: Target,
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
    asked_for = as_workload(target, options)
    if inference and asked_for.recipe.precision in ("bf16", "fp16"):  # no copies in fp32: nothing is trained
        recipe = msgspec.structs.replace(asked_for.recipe, precision="bf16-pure")
        asked_for = msgspec.structs.replace(asked_for, recipe=recipe)
    machines = [machine_with(one) for one in _gpus(gpu)]
    if not machines and (tokens is not None or measured_ns is not None):
        what = "days to train" if tokens is not None else "an MFU"
        raise FlopwiseError(f"{what} can be predicted only for a GPU", "add gpu, for example --gpu h100")
    questions = Questions(
        tokens=tokens, gpus=gpus, mfu=mfu, measured_ns=measured_ns, optimizer_bits=optimizer_bits, inference=inference
    )
    found = account_for(asked_for, machines, questions)
    of_file = hf_config.notes(asked_for.target, asked_for.own_model is not None)
    return msgspec.structs.replace(found, notes=found.notes + of_file + _of_a_rank(asked_for, _gpus(gpu)))


def _of_a_rank(asked_for: Workload, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    recipe, found = asked_for.recipe, exchanged(asked_for)
    if recipe.parallel == "off":
        return ()
    size = units.rate(sum(one.times * one.n_bytes for one in found), "B")
    kinds = " and ".join(dict.fromkeys(one.kind for one in found))
    times = [f"{units.duration(ns)} ({one.title})" for one in gpus if (ns := exchange_ns(found, one)) is not None]
    over = f", {', '.join(times)} over the GPUs' own links if nothing hides it" if times else ""
    return (f"Besides, {recipe.ranks} ranks exchange {size} by {kinds}{over}",) if found else ()


def training_run(
    parameters: float, *, gpu: str, tokens: float, gpus: int = 1, mfu: float = 0.5
) -> tuple[Gpu, TrainingTime]:
    """How long a model of so many parameters trains, by the rule 6 · parameters · tokens, in bf16.

    >>> round(training_run(70e9, gpu="h100", tokens=15e12, gpus=1024)[1].days, 1)
    143.9
    """
    fields.number("parameters", parameters, 1, 1e18)
    one, *others = _gpus(gpu)
    peak = one.peak("bf16")
    if others or peak is None:
        raise FlopwiseError(f"gpu = {fields.show(gpu)} is not one GPU with a known bf16 rate", "for example --gpu h100")
    return one, training_time(parameters, tokens, gpus, peak, mfu, dtype="bf16")


def _gpus(names: str | Sequence[str]) -> list[Gpu]:
    words = names.split(",") if isinstance(names, str) else names
    found = [gpu_named(word.strip()) for word in words if word.strip()]
    if words and not found:
        raise FlopwiseError(f"gpu = {fields.show(names)} names no GPU", f"known: {', '.join(gpu_names())}")
    return list({one.name: one for one in found}.values())  # each once
