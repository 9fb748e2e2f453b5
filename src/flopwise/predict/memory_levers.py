"""What each lever would change of a step's peak memory, by the closed form; nothing is run."""

import math
from typing import Any

import msgspec

from flopwise.predict.fit import peak_of
from flopwise.predict.shapes.step import StepCost, account_step
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import Workload
from flopwise.work.operation import GRADIENTS, WORKSPACE

ARITHMETIC, FROM_OWNERS = "closed form", "from the owners: this step cannot do it"


class LeverEffect(msgspec.Struct, frozen=True, kw_only=True):
    """A lever and the peak it would lead to."""

    lever: str  # '--checkpoint 4'
    peak_bytes: int
    saved_bytes: int  # negative: it costs
    how: str
    note: str = ""


def memory_levers(workload: Workload, gpu: Gpu | None = None) -> tuple[LeverEffect, ...]:
    """Every lever that is not set, the largest saving first; nothing for a step that the closed form does not know.

    On the CPU (the GPU called `cpu`) the figures are a GPU's without its workspaces.

    >>> from flopwise.spec.workload import workload
    >>> found = {effect.lever: effect for effect in memory_levers(workload("small", attention="naive", context=1024))}
    >>> found["--attention sdpa"].saved_bytes > 0
    True
    """
    if not isinstance(workload.subject, ModelSpec) or workload.implementation != "flopwise":
        return ()
    on_cpu = gpu is not None and gpu.name == "cpu"
    gpu = None if on_cpu else gpu
    step = account_step(workload, gpu)
    less = step.start.owners.get(WORKSPACE, 0) if on_cpu else 0
    now, found = step.peak_bytes - less, []
    for lever, value in _untried(workload):
        recipe = msgspec.structs.replace(workload.recipe, **{lever: value})
        then = peak_of(msgspec.structs.replace(workload, recipe=recipe), gpu) - less
        effect = LeverEffect(lever=f"--{lever} {value}", peak_bytes=then, saved_bytes=now - then, how=ARITHMETIC)
        found.append(effect)
    if workload.phase == "train" and workload.recipe.overlap == "off":
        found.append(_of_the_gradients(step, less))
    return tuple(sorted(found, key=lambda effect: -effect.saved_bytes))


def checkpoint_sizes(n_layers: int) -> tuple[int, ...]:
    """Segments worth trying: powers of two up to half the layers, and √layers, the rule of thumb.

    With c bytes for a segment's input and a for what a block keeps, c · layers / N + a · N is least at N = √(layers · c / a):
    √layers only where a block keeps no more than its input, and less where it keeps more, as attention and MLP do.

    >>> checkpoint_sizes(32)
    (1, 2, 4, 6, 8, 16)
    """
    powers = [2**n for n in range(n_layers.bit_length()) if 2**n <= max(1, n_layers // 2)]
    return tuple(sorted({*powers, max(1, round(math.sqrt(n_layers)))}))


def _untried(workload: Workload) -> list[tuple[str, Any]]:
    recipe, spec = workload.recipe, workload.subject
    assert isinstance(spec, ModelSpec)
    trained = workload.phase != "forward"
    levers: list[tuple[str, Any]] = [("precision", "bf16"), ("precision", "bf16-pure"), ("attention", "sdpa")]
    if trained:
        levers += [
            ("loss", "chunked"),
            ("loss", "fused"),
            *(("checkpoint", n) for n in checkpoint_sizes(spec.n_layers)),
        ]
    if workload.phase == "train":
        levers += [("optimizer", "fused"), *([("overlap", "on")] if recipe.precision != "fp16" else [])]
    fused = recipe.attention != "naive"
    return [
        (lever, value)
        for lever, value in levers
        if getattr(recipe, lever) != value and not (lever == "attention" and fused)
    ]


def _of_the_gradients(step: StepCost, less: int) -> LeverEffect:
    """A lever that the step does not have, told from whose bytes each phase's peak is: gradients kept as zeros would be there
    in forward and loss, too.
    """
    now = step.peak_bytes
    gradients = step.after_backward.owners.get(GRADIENTS, 0) if step.after_backward else 0
    kept = max(phase.peak_bytes + gradients - phase.peak.owners.get(GRADIENTS, 0) for phase in step.phases)
    return LeverEffect(
        lever="gradients kept as zeros, not set to none", peak_bytes=kept - less, saved_bytes=now - kept, how=FROM_OWNERS,
        note="this step sets them to none",
    )  # fmt: skip
