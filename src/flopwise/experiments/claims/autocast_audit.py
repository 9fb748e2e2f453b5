"""`autocast-audit`: what has which dtype under autocast, and what autocast kept in fp32, and why. For any model.

One step runs forward and backward while every call of a torch function is watched from above autocast: the dtypes that go in
are the caller's, the dtype that comes out is what autocast made of it. What autocast does to an operation is not read from a list
but found by asking: the same call once more with all of its numbers in half precision and once with all of them in fp32. One
whose result is fp32 either way is kept in fp32, one whose result is half either way is lowered, and the rest follow their inputs.
On the CPU, whose autocast has other rules than the GPU's, the audit is made under both.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from flopwise.errors import Unsupported
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_MEASURABLE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    TableOf,
    Verdict,
    part,
)
from flopwise.records.experiment import Place
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import OpSpec, Workload, workload

if TYPE_CHECKING:
    import torch

    from flopwise.capture.step import Step
    from flopwise.experiments.bench import Bench

CLAIM = (
    "Under autocast the weights, their gradients and the loss stay in fp32; autocast runs matrix products in half precision, and "
    "keeps norms, softmax and losses in fp32."
)
PRECISIONS = ("fp16", "bf16")
HALVES = set(PRECISIONS)
TOY = "ToyModel"
OWN_RULES, CUDA_RULES = "rules of this device", "CUDA's rules, applied on the CPU"
# What autocast does to an operation, and what it is given: the words of `autocast_watch`, which has torch.
LOWERED, KEPT, FOLLOWS, OWN = "lowered", "kept in fp32", "follows its inputs", "cast by its own code"
MIX = "fp32 and half"
TOKENS = 64  # the longest context that is run: dtypes do not depend on it, nor on the batch

PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention",
}  # fmt: skip
# Why an operation is kept, by its name.
_SUMS = "it sums many squares: half precision rounds the small ones away, and fp16 overflows"
_POWERS = "its results span more than fp16's range, and small differences of them count"
_LOSSES = "a logarithm and a sum over everything: half precision would round away what the gradient is made of"
SENSITIVE = {
    "layer_norm": _SUMS, "rms_norm": _SUMS, "group_norm": _SUMS, "norm": _SUMS, "sum": _SUMS, "cumsum": _SUMS, "prod": _SUMS,
    "softmax": _POWERS, "exp": _POWERS, "pow": _POWERS, "rsqrt": _POWERS, "log": _POWERS, "log_softmax": _LOSSES,
    "cross_entropy": _LOSSES, "nll_loss": _LOSSES, "mse_loss": _LOSSES, "binary_cross_entropy_with_logits": _LOSSES,
}  # fmt: skip
# Of these the claim speaks: norms, softmax and losses.
CLAIMED = {
    op
    for op, why in SENSITIVE.items()
    if why == _LOSSES or op in ("layer_norm", "rms_norm", "group_norm", "norm", "softmax")
}
HALF, FULL = "half precision", "fp32"


def measure(bench: "Bench") -> Iterator[Row]:
    from torch._subclasses import FakeTensorMode

    from flopwise.predict.dry.cuda_autocast import cuda_autocast
    from flopwise.predict.dry.fake_step import tolerant_modules

    if bench.workload and isinstance(bench.workload.subject, OpSpec):
        raise Unsupported(
            f"{bench.workload.target} is an operation, and an audit is of a model", "a preset, hf:… or py:…"
        )
    for chosen in [bench.workload] if bench.workload else [None, workload("small" if bench.on_gpu else "tiny")]:
        for rules in (OWN_RULES,) if bench.on_gpu else (OWN_RULES, CUDA_RULES):
            for precision in PRECISIONS:
                about = {"model": TOY if chosen is None else chosen.target, "rules": rules, "precision": precision}
                bench.doing(f"{about['model']} under {precision} autocast, {rules}")
                with ExitStack() as stack:
                    if rules == CUDA_RULES:
                        stack.enter_context(cuda_autocast())
                    if chosen and isinstance(chosen.subject, ModelSpec) and not bench.on_gpu:
                        # Half-precision products can take a CPU minutes: fake tensors have dtypes and no numbers.
                        stack.enter_context(tolerant_modules())
                        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                    try:
                        step = (
                            _toy(precision, bench.device) if chosen is None else _step(chosen, precision, bench.device)
                        )
                    except Unsupported as error:
                        yield {"part": "refused", **about, "why": error.message}
                        continue
                    for row in _audited(step, precision):
                        yield {**row, **about}


def _run(chosen: Workload, precision: str) -> Workload:
    """The workload as it is audited: eager; of a model of ours without an optimizer, and of few tokens."""
    recipe = msgspec.structs.replace(chosen.recipe, precision=precision, compile="off", graph="off", checkpoint=0)
    if not isinstance(chosen.subject, ModelSpec):
        return msgspec.structs.replace(chosen, recipe=recipe)
    few = {"batch": 1, "context": min(TOKENS, chosen.context), "phase": "backward"}
    return msgspec.structs.replace(chosen, recipe=recipe, **few)


def _step(chosen: Workload, precision: str, device: "torch.device") -> "Step":
    from flopwise.capture.build import build_step

    if isinstance(chosen.subject, ModelSpec):
        return build_step(_run(chosen, precision), device)
    # A step of the user's own runs as it is, and autocast around it: dtypes need no loss scaler, as training in fp16 would.
    step = _in_autocast(build_step(_run(chosen, "fp32"), device), precision, device)
    if step.model is None:
        raise Unsupported(f"{chosen.target} shows no model whose modules could be watched", "build it in the factory")
    return step


def _in_autocast(step: "Step", precision: str, device: "torch.device") -> "Step":
    from flopwise.capture.outside import NOT_AUTOCAST
    from flopwise.lm.precision import autocast
    from flopwise.spec.recipe import Recipe

    def around(run: Callable[[], object]) -> object:
        with autocast(Recipe(precision=precision), device.type):
            return run()

    phases = {name: run if name in NOT_AUTOCAST else partial(around, run) for name, run in step.phases.items()}
    return replace(step, phases=phases)


def _toy(precision: str, device: "torch.device") -> "Step":
    """The course's small model: linear, ReLU, layer norm, linear; and a cross entropy."""
    import torch
    from torch import nn

    from flopwise.capture.step import Step
    from flopwise.lm.precision import autocast
    from flopwise.records.run import Ran
    from flopwise.spec.recipe import Recipe

    torch.manual_seed(0)
    layers = {"fc1": nn.Linear(8, 10, bias=False), "relu": nn.ReLU(), "ln": nn.LayerNorm(10)}
    model = nn.Sequential()
    for name, layer in (layers | {"fc2": nn.Linear(10, 8, bias=False)}).items():
        model.add_module(name, layer)
    model.to(device)
    x, target = torch.randn(16, 8, device=device), torch.randint(8, (16,), device=device)
    made: list[torch.Tensor] = []

    def forward() -> None:
        with autocast(Recipe(precision=precision), device.type):
            made[:] = [nn.functional.cross_entropy(model(x), target)]

    return Step(
        phases={"forward": forward, "backward": lambda: made[0].backward()}, ran=lambda: Ran(device=str(device)),
        model=model, trained=model, loss=lambda: made[0],
    )  # fmt: skip


def _audited(step: "Step", precision: str) -> Iterator[Row]:
    """Run the step once under watch, and tell."""
    from flopwise.experiments.autocast_watch import Watch
    from flopwise.spec.dtypes import dtype_name

    assert step.model is not None
    watch = Watch(step.model, precision)
    with watch:
        for phase in step.phases.values():
            phase()
    for kind, tensors in (
        ("parameters", list(step.model.parameters())),
        ("gradients", [p.grad for p in step.model.parameters() if p.grad is not None]),
    ):
        for dtype, same in groupby(sorted(tensors, key=lambda t: str(t.dtype)), key=lambda t: t.dtype):
            found = list(same)
            yield _whole(kind, dtype_name(dtype), len(found), sum(t.nbytes for t in found))
    loss = step.loss()
    if loss is not None:
        yield _whole("loss", dtype_name(loss.dtype), 1, loss.nbytes)
    for one in watch.modules:
        yield {"part": "module", **one}
    for one in watch.calls():
        yield {"part": "call", **one}


def _whole(what: str, dtype: str, tensors: int, held_bytes: int) -> Row:
    return {"part": "whole", "what": what, "dtype": dtype, "tensors": tensors, "held_bytes": held_bytes}


def reason(call: Mapping[str, Any]) -> str:
    """Why a call's result has the dtype it has.

    >>> reason({"op": "linear", "given": "fp32", "dtype": "bf16", "treatment": LOWERED})
    'autocast casts its inputs to half precision: a matrix product is where the time goes, and it adds in fp32'
    >>> reason({"op": "add", "given": MIX, "dtype": "fp32", "treatment": FOLLOWS})
    'one of its inputs is fp32, and the wider dtype wins'
    """
    op, given, dtype, treatment = call["op"], call["given"], call["dtype"], call["treatment"]
    if treatment == LOWERED:
        product = ": a matrix product is where the time goes, and it adds in fp32" if op in PRODUCTS else ""
        return f"autocast casts its inputs to half precision{product}"
    if treatment == KEPT:
        return f"autocast keeps it in fp32: {SENSITIVE.get(op, 'half precision would lose too much in it')}"
    if treatment == OWN:
        return "the model's own code names the dtype"
    if not op:
        return "stored, not computed under autocast"
    if given == MIX:
        return (
            "one of its inputs is fp32, and the wider dtype wins"
            if dtype == "fp32"
            else "autocast leaves it as it is, and its result has its first input's dtype"
        )
    if given == dtype:
        return f"autocast leaves it as it is, and its inputs are {_width(given)}"
    return "not found out"


def _broken(rows: Rows) -> list[str]:
    """What is otherwise than claimed: by what came out, and by what autocast does whatever goes in."""
    found = [f"{row['what']} in {row['dtype']}" for row in part(rows, "whole") if row["dtype"] != FULL]
    for row in (*part(rows, "call"), *part(rows, "module")):
        op, dtype, treatment = row.get("op"), row["dtype"], row.get("treatment")
        if op in PRODUCTS and dtype != row["precision"]:
            found.append(f"{op} gives {dtype} under {row['precision']}")
        if op in CLAIMED and dtype != FULL:
            found.append(f"{op} gives {dtype}")
        elif op in CLAIMED and treatment in (LOWERED, FOLLOWS):
            why = "is left to the dtype of its inputs, fp32 here" if treatment == FOLLOWS else "is lowered"
            found.append(f"{op} {why}")
    return list(dict.fromkeys(found))


def judge(rows: Rows, place: Place) -> Verdict:
    own, other = ([row for row in rows if row.get("rules") == rules] for rules in (OWN_RULES, CUDA_RULES))
    calls, wholes, refused = part(own, "call"), part(own, "whole"), part(rows, "refused")
    if not wholes:
        return Verdict(NOT_MEASURABLE, f"{refused[0]['why']}." if refused else "no step was watched.")
    if not any(row["op"] in PRODUCTS for row in calls):
        return Verdict(INCONCLUSIVE, "the model calls no matrix product that could be watched.")
    broken = _broken(own)
    lowered, kept, follows = (
        sorted({row["op"] for row in calls if row["treatment"] == treatment}) for treatment in (LOWERED, KEPT, FOLLOWS)
    )
    of = ", ".join(dict.fromkeys(row["model"] for row in wholes))
    whole = sum(row["tensors"] for row in wholes if row["dtype"] == FULL), sum(row["tensors"] for row in wholes)
    said = (
        f"in {of} {whole[0]} of {whole[1]} weights, gradients and losses are fp32; {_whose(place)} lowers {_list(lowered)}, "
        f"keeps {_list(kept)} in fp32 and leaves {_list(follows)} to the dtype of their inputs"
    )
    if broken:
        said += f"; not as claimed: {', '.join(broken)}"
    if part(other, "call"):
        against = _broken(other)
        found = f"not as claimed: {', '.join(against)}" if against else "it is as claimed"
        said += f". With CUDA's rules as this torch has them, applied on the CPU, {found}"
    if refused:
        said += f". Refused: {refused[0]['precision']}: {refused[0]['why']}"
    if broken:
        return Verdict(REFUTED, f"{said}.")
    if missing := _missing(own):
        return Verdict(INCONCLUSIVE, f"{said}. Not watched: {', '.join(missing)}.")
    if not CLAIMED & {row["op"] for row in calls}:
        return Verdict(INCONCLUSIVE, f"{said}. No norm, softmax or loss was called that autocast could have kept.")
    return Verdict(CONFIRMED, f"{said}.")


def _missing(rows: Rows) -> list[str]:
    """What the claim is about and no row tells; a step of the user's own may have no loss to show."""
    told = {(row["model"], row["precision"], row["what"]) for row in part(rows, "whole")}
    refused = {(row["model"], row["precision"]) for row in part(rows, "refused")}
    models = dict.fromkeys(model for model, _, _ in told)
    # Beside the course's model there is always one of ours: its loss and its norms are what is claimed.
    found = ["a Transformer beside the course's model"] if list(models) == [TOY] else []
    ours = TOY in models
    return found + [
        f"{what} of {model} under {precision}"
        for model in models
        for precision in PRECISIONS
        if (model, precision) not in refused
        for what in ("parameters", "gradients", *(["loss"] if ours else []))
        if (model, precision, what) not in told
    ]


def _whose(place: Place) -> str:
    """The rules are torch's, and differ from version to version."""
    return f"the autocast of {place.torch}" if place.torch else "autocast"


def _list(words: list[str]) -> str:
    return ", ".join(words) if words else "nothing"


def alike(path: str) -> str:
    """A module's path with the numbers of its like siblings left out.

    >>> alike("blocks.11.mlp.up")
    'blocks.*.mlp.up'
    """
    return ".".join("*" if word.isdecimal() else word for word in path.split("."))


def _width(dtype: str) -> str:
    return "half" if dtype in HALVES else dtype


def _beside(rows: Rows, key: tuple[str, ...]) -> list[Row]:
    """What is alike under fp16 and bf16 as one row, with the dtypes of the two beside each other."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        one = found.setdefault(tuple(row[field] for field in key), dict(row))
        for field in ("dtype", "gradient_dtype"):
            if field in row:
                one[f"{row['precision']}_{field}"] = row[field]
    return list(found.values())


def modules_of(rows: Rows) -> list[Row]:
    """The modules in order; those that differ in nothing but the number of their block are one row, with their count."""
    told: dict[tuple[Any, ...], Row] = {}
    fields = ("model", "rules", "precision", "dtype", "gradient_dtype", "op", "given", "treatment")
    for row in part(rows, "module"):
        name = alike(row["module"]) or "the whole model"
        one = {**row, "module": name, "given": _width(row["given"]), "count": 0, "why": reason(row)}
        told.setdefault((name, *(row[field] for field in fields)), one)["count"] += 1
    return list(told.values())


def _groups(rows: Rows) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["model"], row["rules"]) for row in rows))


def draw(rows: Rows, place: Place) -> list[Picture]:
    told = modules_of(rows)
    pictures = []
    for model in dict.fromkeys(row["model"] for row in told):
        points = [
            {**row, "autocast": f"{row['precision']} autocast", "width": FULL if row["dtype"] == FULL else HALF}
            for row in told
            if row["model"] == model
        ]
        pictures.append(
            Picture(
                title=f"Dtype of each module's output: {model}",
                caption="Half precision where a matrix product comes last; fp32 where a norm does, or where fp32 is added.",
                kind="scatter", rows=points, x="autocast", y="module", colour="width", words=(HALF, FULL), column="rules",
                x_title="", y_title="",
            )
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    under = {f"{precision}_dtype": f"under {precision}" for precision in PRECISIONS}
    gradients = {f"{precision}_gradient_dtype": f"its gradient, {precision}" for precision in PRECISIONS}
    wholes = _beside(part(rows, "whole"), ("model", "rules", "what", "tensors"))
    modules = _beside(modules_of(rows), ("model", "rules", "module", "op", "given", "treatment", "count"))
    calls = [{**row, "given": _width(row["given"]), "why": reason(row)} for row in part(rows, "call")]
    calls = _beside(calls, ("model", "rules", "op", "given", "treatment", "count"))
    tables = []
    if wholes:
        what = {"model": "model", "rules": "rules", "what": "what", "tensors": "tensors", "held_bytes": "held"}
        tables.append(TableOf("parameters, gradients and loss", _there(what | under, wholes), wholes))
    for model, rules in _groups(modules):
        some, other = ([row for row in of if (row["model"], row["rules"]) == (model, rules)] for of in (modules, calls))
        columns = {"module": "module", "count": "modules", "kind": "class", **under, **gradients}
        columns |= {"op": "last operation", "given": "it is given", "why": "why"}
        tables.append(TableOf(f"every module's output: {model}, {rules}", _there(columns, some), some))
        columns = {
            "op": "operation",
            "given": "given",
            **under,
            "count": "calls",
            "treatment": "autocast",
            "why": "why",
        }
        tables.append(TableOf(f"every operation: {model}, {rules}", _there(columns, other), other))
    if refused := part(rows, "refused"):
        tables.append(TableOf("not audited", {"model": "model", "precision": "autocast", "why": "why"}, refused))
    return tables


def _there(columns: dict[str, str], rows: Rows) -> dict[str, str]:
    """The columns that some row has: of one precision alone, where the other was refused."""
    return {key: heading for key, heading in columns.items() if any(key in row for row in rows)}


EXPERIMENT = Experiment(
    name="autocast-audit",
    number=6,
    line="The dtype of weights, every module's output, loss and gradients under fp16 and bf16 autocast, and why; for any model.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
    takes_workload=True,
)
