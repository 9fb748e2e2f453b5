"""`compiler-view`: what torch.compile makes of three formulas: the graph it sees, the kernels it writes, launches and bytes.

Before: each operation is a launch that reads and writes memory, counted as it runs. After: the calls in the code that Inductor
generates, which is kept with the run. A kernel moves each tensor that it is given at least once.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.errors import one_line
from flopwise.experiments.claims.fusion import operations, sines
from flopwise.experiments.experiment import Axis, Experiment, Picture, bar, columns, span, table_of
from flopwise.experiments.rows import Row, Timed, by, fields, select
from flopwise.experiments.verdict import Check, each, require, said
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

    Function = Callable[[torch.Tensor], torch.Tensor]

LINE = "What torch.compile makes of sin² + cos², GeLU and softmax: FX graph, generated kernels, launches and bytes."
CLAIM = (
    "torch.compile turns sin² + cos², a written-out GeLU and a written-out softmax into one kernel each, which is given only x "
    "and the result."
)
EAGER, COMPILED = WAYS = ("eager", "torch.compile")
CHAINS = ("sin² + cos²", "GeLU", "softmax")
WRONG = 1e-5
GAP = 0.03  # of a bar in the picture, between it and the next
ONCE = 1.05  # times the bytes of x and of the result: a softmax's maxima and sums are a thousandth
_CALL = re.compile(r"^[ \t]+(?:\w+ = )?((?:cpp|triton)_\w+?)(?:\.run)?\((.*)\)", re.MULTILINE)
_BUFFER = re.compile(r"(\w+) = empty_strided\w*\(\(([\d, ]*)\), .*?torch\.(\w+)\)")
_INPUT = re.compile(r"assert_size_stride\((\w+), \(([\d, ]*)\)")
_REUSED = re.compile(r"(\w+) = (\w+); del \2\b")


class Launch(Row, frozen=True, kw_only=True, tag_field="part", tag="launch"):
    """One launch: an operation of the eager function, or a generated kernel."""

    chain: str
    way: str
    position: int
    kernel: str
    moved_bytes: int


class Chain(Timed, frozen=True, kw_only=True, tag_field="part", tag="chain"):
    chain: str
    way: str
    n: int
    graph: str  # names of the FX graph's nodes
    launches: int
    chain_bytes: int
    least_bytes: int  # x and the result, once each
    off: float  # largest difference from the eager result


class Skipped(Row, frozen=True, kw_only=True, tag_field="part", tag="skipped"):
    chain: str
    way: str
    graph: str
    note: str


Rows = Sequence[Launch | Chain | Skipped]


def measure(bench: "Bench") -> Iterator[Launch | Chain | Skipped]:
    width = 1024
    x = bench.randn((2**16 if bench.on_gpu else 2**12) // (1 + 3 * bench.quick), width)
    for number, (chain, function) in enumerate(_chains().items()):
        bench.doing(f"{chain}, {EAGER}")
        graph, right = ", ".join(graph_nodes(function, x)), function(x)
        about = {"chain": chain, "n": x.numel(), "graph": graph, "least_bytes": x.nbytes + right.nbytes}
        launches = [(name, sum(sizes)) for name, sizes in operations(function, x)]
        yield from _rows(bench, about, EAGER, launches, function, x, right)
        if bench.quick and not bench.on_gpu:
            note = "quick mode on a CPU leaves the C++ compiler out"
            yield Skipped(chain=chain, way=COMPILED, graph=graph, note=note)
            continue
        bench.doing(f"{chain}, {COMPILED}")
        try:
            compiled, code = _compiled(function, x)
            bench.file(f"{number}.py").write_text(code, encoding="utf-8")
            found = list(_rows(bench, about, COMPILED, generated_launches(code), compiled, x, right))
        except Exception as error:  # noqa: BLE001  whatever the compiler raises is a row
            note = one_line(f"{type(error).__name__}: {error}")[:200]
            yield Skipped(chain=chain, way=COMPILED, graph=graph, note=note)
        else:
            yield from found


def _rows(
    bench: "Bench",
    about: Mapping[str, Any],
    way: str,
    launches: Sequence[tuple[str, int]],
    function: "Function",
    x: "torch.Tensor",
    right: "torch.Tensor",
) -> Iterator[Launch | Chain]:
    for position, (kernel, moved) in enumerate(launches):
        yield Launch(chain=about["chain"], way=way, position=position, kernel=kernel, moved_bytes=moved)
    off = float((function(x) - right).abs().max())
    timing = bench.time(partial(function, x), seconds=0.1)
    counted: dict[str, Any] = {"launches": len(launches), "chain_bytes": sum(moved for _, moved in launches)}
    yield Chain(way=way, off=off, **about, **counted, **fields(timing))


def softmax(x: "torch.Tensor") -> "torch.Tensor":
    """exp(x − max) over its sum, row by row."""
    import torch

    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def _chains() -> "dict[str, Function]":
    from flopwise.lm.layers import gelu_eager

    return dict(zip(CHAINS, (sines, gelu_eager, softmax), strict=True))


def graph_nodes(function: "Function", x: "torch.Tensor") -> list[str]:
    """The names of the operations in the graph that torch.compile hands to its backend."""
    import torch

    found: list[str] = []

    def look(graph: Any, inputs: Any) -> Any:
        found.extend(node.name for node in graph.graph.nodes if node.op.startswith("call_"))
        return graph.forward

    torch.compile(function, backend=look)(x)
    return found


def _compiled(function: "Function", x: "torch.Tensor") -> "tuple[Function, str]":
    """The compiled function and the code that was generated for it."""
    import torch

    from flopwise.torch_private import generated_code

    compiled = torch.compile(function, dynamic=False, options={"fx_graph_cache": False})
    return compiled, "\n".join(generated_code(compiled, x))


def generated_launches(code: str) -> list[tuple[str, int]]:
    """The kernels that generated code calls, and the bytes of the tensors that each is given.

    >>> generated_launches('''
    ...     assert_size_stride(arg0_1, (4, 8), (8, 1))
    ...     buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
    ...     triton_poi_fused_sin_0.run(arg0_1, buf0, 32, stream=stream0)
    ... ''')
    [('triton_poi_fused_sin_0', 256)]
    """
    sizes = {name: 4 * _numbers(shape) for name, shape in _INPUT.findall(code)}  # x is fp32
    sizes |= {name: _numbers(shape) * _itemsize(dtype) for name, shape, dtype in _BUFFER.findall(code)}
    for new, old in _REUSED.findall(code):
        sizes[new] = sizes.get(old, 0)
    calls = ((name, [given.strip() for given in arguments.split(",")]) for name, arguments in _CALL.findall(code))
    return [
        (name, sum(sizes.get(one, 0) for one in given)) for name, given in calls if any(one in sizes for one in given)
    ]


def _numbers(shape: str) -> int:
    return math.prod(int(side) for side in shape.split(",") if side.strip())


def _itemsize(dtype: str) -> int:
    import torch

    return int(getattr(torch, dtype).itemsize)


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    found = by(select(rows, Chain), "chain", "way")
    wrong = ", ".join(row.chain for row in found.values() if not row.off <= WRONG)
    yield require("right results", not wrong, f"wrong results: {wrong}.")
    for chain in CHAINS:
        if (chain, COMPILED) in found and (chain, EAGER) in found:
            yield said(_described(found[chain, EAGER], found[chain, COMPILED]))
    missing = [f"{chain} ({way})" for chain in CHAINS for way in WAYS if (chain, way) not in found]
    yield each("all compiled", dict.fromkeys(missing), unknown="Not measured: {}.")
    notes = dict.fromkeys(row.note.rstrip(".") for row in select(rows, Skipped))
    yield said(" ".join(f"{note}." for note in notes))
    made = {row.chain: row for row in found.values() if row.way == COMPILED}
    yield each("one kernel", {c: row.launches == 1 for c, row in made.items()}, refuted="Not one kernel: {}.")
    once = {chain: row.chain_bytes <= ONCE * row.least_bytes for chain, row in made.items()}
    yield each("once in, once out", once, refuted="Moves more than x and the result: {}.")


def _described(before: Chain, after: Chain) -> str:
    return (
        f"{before.chain}: {before.launches} launches and {units.size(before.chain_bytes)} become {after.launches} and "
        f"{units.size(after.chain_bytes)}, {units.duration(before.took_ns)} become {units.duration(after.took_ns)}."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    spans, reached = [], dict[str, int]()
    for row in select(rows, Launch):
        name = f"{row.chain}, {row.way}"
        begun = reached.get(name, 0)
        reached[name] = begun + row.moved_bytes
        what = row.kernel if row.way == EAGER else f"kernel {row.position + 1}"
        spans.append(
            {"name": name, "from_bytes": begun, "to_bytes": reached[name] - GAP * row.moved_bytes, "kernel": what}
        )
    times = [fields(row) | {"took_ns": row.took_ns} for row in select(rows, Chain)]
    moved = Axis("from_bytes", "read and written so far", to="to_bytes")
    return [
        span(spans, moved, Axis("name"), colour="kernel").titled(
            "Launches, each as long as the bytes it moves",
            "Eager, a bar is an operation; compiled, a generated kernel.",
        ),
        bar(times, Axis("chain"), Axis("took_ns", "time"), colour="way").titled(
            "Time before and after", "What is not moved takes no time."
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    chains = columns("chain", "way", "launches", chain_bytes="moved", wall_ns="wall")
    chains |= columns(gpu_ns="GPU") if place.on_gpu else {}
    chains |= columns(off="error", graph="FX graph") | (columns(note="why not") if select(rows, Skipped) else {})
    launches = columns("chain", "way", position="launch", kernel="operation or kernel", moved_bytes="moved")
    shown = [fields(row) for row in rows if not isinstance(row, Launch)]
    return [
        table_of("three formulas, eager and compiled", chains, shown),
        table_of("every launch", launches, [fields(row) for row in select(rows, Launch)]),
    ]


EXPERIMENT = Experiment(22, "compiler-view", LINE, CLAIM, (Launch, Chain, Skipped), measure, judge, draw, tabulate)
