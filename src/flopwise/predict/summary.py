"""A step's work and a model's parameters added up for reading: layers together, by module and class of op."""

import re
from collections.abc import Iterable

import msgspec

from flopwise import units
from flopwise.predict.shapes.memory import without_layer
from flopwise.predict.shapes.network import weight_shapes
from flopwise.spec.model import ModelSpec
from flopwise.work.operation import OpWork


class WorkRow(msgspec.Struct, frozen=True, kw_only=True):
    """One module's ops of one class, of all layers, in one step."""

    module: str
    kind: str
    forward_flops: int = 0  # with the loss
    backward_flops: int = 0  # with what is computed again
    read_bytes: int = 0
    write_bytes: int = 0
    kernels: int = 0

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0


def by_module(ops: Iterable[OpWork]) -> tuple[WorkRow, ...]:
    """The ops added up by module and class, in the order in which the step first comes to them.

    >>> op = OpWork(op="mm", module="blocks.0.mlp.up", phase="forward", kind="matmul", dtype="bf16", flops=8)
    >>> by_module([op, msgspec.structs.replace(op, module="blocks.1.mlp.up", phase="backward")])[0].flops
    16
    """
    rows: dict[tuple[str, str], list[int]] = {}
    for op in ops:
        optimizer = op.phase == "optimizer"
        key = ("optimizer" if optimizer else without_layer(op.module) or "model", op.kind)
        row = rows.setdefault(key, [0, 0, 0, 0, 0])
        row[0 if op.phase in ("forward", "loss") else 1] += op.flops
        for i, value in enumerate((op.read_bytes, op.write_bytes, op.kernels), 2):
            row[i] += value
    return tuple(
        WorkRow(
            module=m, kind=k, forward_flops=r[0], backward_flops=r[1], read_bytes=r[2], write_bytes=r[3], kernels=r[4]
        )
        for (m, k), r in rows.items()
    )


def total_row(rows: Iterable[WorkRow]) -> WorkRow:
    """All rows in one."""
    names, some = ("forward_flops", "backward_flops", "read_bytes", "write_bytes", "kernels"), list(rows)
    return WorkRow(module="all", kind="", **{name: sum(getattr(row, name) for row in some) for name in names})


class ParameterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One module's parameters, of all layers."""

    module: str
    parameters: int
    share: float


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
