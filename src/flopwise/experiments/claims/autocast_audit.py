"""`autocast-audit`: what has which dtype under autocast, and what autocast kept in fp32, and why. For any model.

One step runs forward and backward under watch (see `autocast_watch.py`). An operation whose result is fp32 whatever it is given
is kept in fp32, one whose result is half either way is lowered, and the rest follow their inputs. On the CPU, whose autocast
has other rules than the GPU's, the audit is made under both.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flopwise.errors import Unsupported
from flopwise.experiments.autocast_rows import (
    CUDA_RULES,
    FOLLOWS,
    KEPT,
    LOWERED,
    MIX,
    OWN,
    OWN_RULES,
    Call,
    Module,
    Operation,
    Refused,
    Whole,
)
from flopwise.experiments.experiment import Axis, Experiment, Picture, columns, scatter, table_of
from flopwise.experiments.rows import fields, select, values
from flopwise.experiments.verdict import NOT_MEASURABLE, Check, each, holds, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table
from flopwise.spec.operations import OpSpec
from flopwise.spec.workload import workload

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "The dtype of weights, every module's output, loss and gradients under fp16 and bf16 autocast, and why; for any model."
CLAIM = (
    "Under autocast the weights, their gradients and the loss stay in fp32; autocast runs matrix products in half precision, and "
    "keeps norms, softmax and losses in fp32."
)
PRECISIONS = ("fp16", "bf16")
TOY = "ToyModel"
HALF, FULL = "half precision", "fp32"
PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"}
PRODUCTS |= {"scaled_dot_product_attention"}
NORMS = {"layer_norm", "rms_norm", "group_norm", "norm"}
LOSSES = {"log_softmax", "cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits"}
CLAIMED = {*NORMS, "softmax", *LOSSES}
# Why an operation is kept, by its name.
SENSITIVE = {
    **dict.fromkeys(
        (*NORMS, "sum", "cumsum", "prod"),
        "it sums many squares: half precision rounds the small ones away, and fp16 overflows",
    ),
    **dict.fromkeys(
        ("softmax", "exp", "pow", "rsqrt", "log"),
        "its results span more than fp16's range, and small differences of them count",
    ),
    **dict.fromkeys(
        LOSSES, "a logarithm and a sum over everything: half precision would round away what the gradient is made of"
    ),
}

AnyRow = Whole | Module | Call | Refused
Rows = Sequence[AnyRow]


def measure(bench: "Bench") -> Iterator[AnyRow]:
    from flopwise.experiments.autocast_watch import audit

    if bench.workload and isinstance(bench.workload.subject, OpSpec):
        operation = f"{bench.workload.target} is an operation, and an audit is of a model"
        raise Unsupported(operation, "a preset, hf:… or py:…")
    chosen = [bench.workload] if bench.workload else [None, workload("small" if bench.on_gpu else "tiny")]
    rules = (OWN_RULES,) if bench.on_gpu else (OWN_RULES, CUDA_RULES)
    for model, rule, precision in ((m, r, p) for m in chosen for r in rules for p in PRECISIONS):
        about = {"model": model.target if model else TOY, "rules": rule, "precision": precision}
        bench.doing(f"{about['model']} under {precision} autocast, {rule}")
        try:
            yield from audit(model, bench.device, about)
        except Unsupported as error:
            yield Refused(why=error.message, **about)


def reason(call: Operation) -> str:
    """Why a call's result has the dtype it has."""
    if call.treatment == LOWERED:
        product = ": a matrix product is where the time goes, and it adds in fp32" if call.op in PRODUCTS else ""
        return f"autocast casts its inputs to half precision{product}"
    if call.treatment == KEPT:
        return f"autocast keeps it in fp32: {SENSITIVE.get(call.op, 'half precision would lose too much in it')}"
    if call.treatment == OWN:
        return "the model's own code names the dtype"
    if not call.op:
        return "stored, not computed under autocast"
    if call.given == MIX and call.dtype == FULL:
        return "one of its inputs is fp32, and the wider dtype wins"
    if call.given == MIX:
        return "autocast leaves it as it is, and its result has its first input's dtype"
    return (
        f"autocast leaves it as it is, and its inputs are {_width(call.given)}"
        if call.given == call.dtype
        else "unknown"
    )


def broken(rows: Rows) -> list[str]:
    """What is otherwise than claimed: by what came out, and by what autocast does whatever goes in."""
    found = [f"{row.what} in {row.dtype}" for row in select(rows, Whole) if row.dtype != FULL]
    for row in sorted(select(rows, Operation), key=lambda row: isinstance(row, Module)):
        if row.op in PRODUCTS and row.dtype != row.precision:
            found.append(f"{row.op} gives {row.dtype} under {row.precision}")
        if row.op in CLAIMED and row.dtype != FULL:
            found.append(f"{row.op} gives {row.dtype}")
        elif row.op in CLAIMED and row.treatment == FOLLOWS:
            found.append(f"{row.op} is left to the dtype of its inputs, fp32 here")
        elif row.op in CLAIMED and row.treatment == LOWERED:
            found.append(f"{row.op} is lowered")
    return list(dict.fromkeys(found))


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    own, other = ([row for row in rows if row.rules == rules] for rules in (OWN_RULES, CUDA_RULES))
    calls, wholes = select(own, Call), select(own, Whole)
    refused = next(iter(select(rows, Refused)), None)
    unable = f"{refused.why}." if refused else "no step was watched."
    yield require("a step", wholes, unable, NOT_MEASURABLE)
    ops = {call.op for call in calls}
    yield require("products", PRODUCTS & ops, "the model calls no matrix product that could be watched.")
    yield said(_described(wholes, calls, place))
    wrong = broken(own)
    yield holds("as claimed", not wrong, refuted=f"Not as claimed: {', '.join(wrong)}.")
    if select(other, Call):
        against = broken(other)
        found = f"not as claimed: {', '.join(against)}" if against else "it is as claimed"
        yield said(f"With CUDA's rules as this torch has them, applied on the CPU, {found}.")
    if refused:
        yield said(f"Refused: {refused.precision}: {refused.why}.")
    yield each("all watched", dict.fromkeys(_missing(own)), unknown="Not watched: {}.")
    nothing = "No norm, softmax or loss was called that autocast could have kept."
    yield holds("claimed operations", True if CLAIMED & ops else None, unknown=nothing)


def _described(wholes: Sequence[Whole], calls: Sequence[Call], place: Place) -> str:
    models = ", ".join(dict.fromkeys(row.model for row in wholes))
    in_fp32, tensors = sum(row.tensors for row in wholes if row.dtype == FULL), sum(row.tensors for row in wholes)
    lowered, kept, follows = (
        ", ".join(sorted({call.op for call in calls if call.treatment == treatment})) or "nothing"
        for treatment in (LOWERED, KEPT, FOLLOWS)
    )
    autocast = f"the autocast of {place.torch}" if place.torch else "autocast"  # rules differ from version to version
    return (
        f"in {models} {in_fp32} of {tensors} weights, gradients and losses are fp32; {autocast} lowers {lowered}, "
        f"keeps {kept} in fp32 and leaves {follows} to the dtype of their inputs."
    )


def _missing(rows: Rows) -> list[str]:
    """What the claim is about and no row covers; a step of the user's own may have no loss to show."""
    measured = {(row.model, row.precision, row.what) for row in select(rows, Whole)}
    refused = {(row.model, row.precision) for row in select(rows, Refused)}
    models = dict.fromkeys(model for model, _, _ in measured)
    # With the course's model there is always one of ours: its loss and its norms are what is claimed.
    found = ["a Transformer besides the course's model"] if list(models) == [TOY] else []
    whats = ("parameters", "gradients", "loss") if TOY in models else ("parameters", "gradients")
    wanted = [(model, precision) for model in models for precision in PRECISIONS if (model, precision) not in refused]
    missing = [(*one, what) for one in wanted for what in whats if (*one, what) not in measured]
    return found + [f"{what} of {model} under {precision}" for model, precision, what in missing]


def alike(path: str) -> str:
    """A module's path with the numbers of its like siblings left out.

    >>> alike("blocks.11.mlp.up")
    'blocks.*.mlp.up'
    """
    return ".".join("*" if word.isdecimal() else word for word in path.split("."))


def _width(dtype: str) -> str:
    return "half" if dtype in PRECISIONS else dtype


def _side_by_side(rows: Sequence[Mapping[str, Any]], key: tuple[str, ...]) -> list[dict[str, Any]]:
    """What is alike under fp16 and bf16 as one row, with the dtypes of the two next to each other."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(tuple(row[field] for field in key), dict(row))
        for field in {"dtype", "gradient_dtype"} & set(row):
            one[f"{row['precision']}_{field}"] = row[field]
    return list(found.values())


def modules_of(rows: Rows) -> list[dict[str, Any]]:
    """The modules in order; those that differ in nothing but the number of their block are one row, with their count."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    keys = ("model", "rules", "precision", "dtype", "gradient_dtype", "op", "given", "treatment")
    for row in select(rows, Module):
        name = alike(row.module) or "the whole model"
        one = fields(row) | {"module": name, "given": _width(row.given), "count": 0, "why": reason(row)}
        found.setdefault((name, *(getattr(row, key) for key in keys)), one)["count"] += 1
    return list(found.values())


def draw(rows: Rows, place: Place) -> list[Picture]:
    modules = [
        row | {"autocast": f"{row['precision']} autocast", "width": FULL if row["dtype"] == FULL else HALF}
        for row in modules_of(rows)
    ]
    shared: dict[str, Any] = {"colour": "width", "words": (HALF, FULL), "column": "rules"}
    return [
        scatter([row for row in modules if row["model"] == model], Axis("autocast"), Axis("module"), **shared).titled(
            f"Dtype of each module's output: {model}",
            "Half precision where a matrix product comes last; fp32 where a norm does, or where fp32 is added.",
        )
        for model in dict.fromkeys(row["model"] for row in modules)
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    under = {f"{precision}_dtype": f"under {precision}" for precision in PRECISIONS}
    gradients = {f"{precision}_gradient_dtype": f"its gradient, {precision}" for precision in PRECISIONS}
    wholes = _side_by_side(values(select(rows, Whole)), ("model", "rules", "what", "tensors"))
    like = ("op", "given", "treatment", "count")
    modules = _side_by_side(modules_of(rows), ("model", "rules", "module", *like))
    calls = [fields(row) | {"given": _width(row.given), "why": reason(row)} for row in select(rows, Call)]
    calls = _side_by_side(calls, ("model", "rules", *like))
    of_wholes = columns("model", "rules", "what", "tensors", "held_bytes") | under
    of_modules = columns("module", count="modules", kind="class") | under | gradients
    of_modules |= columns(op="last operation", given="it is given", why="why")
    of_calls = columns(op="operation", given="given") | under | columns(count="calls", treatment="autocast", why="why")
    tables = [_table("parameters, gradients and loss", of_wholes, wholes)]
    for model, rules in dict.fromkeys((row["model"], row["rules"]) for row in modules):
        mine = [[row for row in some if (row["model"], row["rules"]) == (model, rules)] for some in (modules, calls)]
        tables.append(_table(f"every module's output: {model}, {rules}", of_modules, mine[0]))
        tables.append(_table(f"every operation: {model}, {rules}", of_calls, mine[1]))
    headings = columns("model", precision="autocast", why="why")
    return [*tables, table_of("not audited", headings, values(select(rows, Refused)))]


def _table(title: str, headings: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """With the columns that some row has: of one precision alone, where the other was refused."""
    return table_of(title, {key: text for key, text in headings.items() if any(key in row for row in rows)}, rows)


KINDS = (Whole, Module, Call, Refused)
EXPERIMENT = Experiment(6, "autocast-audit", LINE, CLAIM, KINDS, measure, judge, draw, tabulate, takes_workload=True)
