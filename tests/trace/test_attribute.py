"""Attribution: each rule on a trace made by hand, then generated traces with known answers, then real ones."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from gen_kineto import model_ops

from flopwise.trace import tables
from flopwise.trace.attribute import Attribution, attribute
from flopwise.trace.kineto import read_kineto
from flopwise.trace.nsys import read_nsys
from flopwise.trace.tables import NO_ID, Trace

HERE = Path(__file__).resolve().parent
FIXTURES = HERE / "fixtures"
MAIN, AUTOGRAD = 1, 2
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"


class Scene:
    """A trace made by hand: `launch` puts a kernel of 10 ns on the GPU; spans are given as (start, end)."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.rows: dict[str, list[tuple[object, ...]]] = {name: [] for name in SCHEMAS}
        self.clock = 10_000

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def op(
        self, name: str, span: tuple[int, int], sequence: int = NO_ID, thread: int = MAIN, backward: bool = False
    ) -> "Scene":
        self.rows["ops"].append((*span, 7, thread, self.name(name), sequence, backward, NO_ID))
        return self

    def node(self, name: str, span: tuple[int, int], sequence: int = NO_ID, thread: int = AUTOGRAD) -> "Scene":
        return self.op(name, span, sequence, thread, backward=True)

    def range(self, name: str, span: tuple[int, int], thread: int = MAIN, kind: str = "annotation") -> "Scene":
        self.rows["ranges"].append((*span, 7, thread, self.name(name), kind))
        return self

    def launch(self, time: int, thread: int = MAIN, kernel: str = ELEMENTWISE, graph: int = 0) -> "Scene":
        """A kernel launched at a time; with `graph` so many kernels of one CUDA graph."""
        correlation = len(self.rows["kernels"]) + 1
        self.rows["graph_launches" if graph else "launches"].append(
            (time, time + 2, 7, thread, self.name("launch"), correlation)
        )
        for _ in range(graph or 1):
            self.rows["kernels"].append((self.clock, self.clock + 10, 7, 0, 0, self.name(kernel), correlation, NO_ID))
            self.clock += 10
        return self

    def attributed(self) -> Attribution:
        frames = {
            name: pl.DataFrame(rows, schema=SCHEMAS[name], orient="row").sort("start_ns", maintain_order=True)
            for name, rows in self.rows.items()
        }
        return attribute(Trace("kineto", "", tuple(self.names), **frames))

    def column(self, name: str) -> list[str | None]:
        return self.attributed().table[name].to_list()


SCHEMAS = {
    "kernels": tables.KERNELS, "copies": tables.COPIES, "launches": tables.LAUNCHES, "graph_launches": tables.GRAPH_LAUNCHES,
    "graph_runs": tables.GRAPH_RUNS, "syncs": tables.SYNCS, "ops": tables.OPS, "ranges": tables.RANGES,
}  # fmt: skip


def test_a_kernel_belongs_to_the_innermost_op_at_its_launch() -> None:
    scene = Scene().op("aten::linear", (0, 100), 5).op("aten::addmm", (10, 90), 5).op("aten::empty", (20, 30))
    scene.launch(25).launch(30).launch(90).launch(100)
    assert scene.column("op") == ["aten::empty", "aten::addmm", "aten::linear", None]
    assert scene.column("top_op") == ["aten::linear", "aten::linear", "aten::linear", None]


def test_the_forward_op_is_the_last_to_start_of_its_sequence_number() -> None:
    """A view before the product and the product's own wrappers all show the number that the product's node will get."""
    scene = Scene().op("aten::view", (0, 5), 8).op("aten::matmul", (10, 50), 8).op("aten::mm", (20, 40), 8)
    scene.op("aten::add", (60, 70), 9)
    scene.node("autograd::engine::evaluate_function: MmBackward0", (100, 150), 8).node("MmBackward0", (110, 140), 8)
    scene.op("aten::mm", (120, 130), thread=AUTOGRAD).launch(125, AUTOGRAD).launch(145, AUTOGRAD)
    assert scene.column("forward_op") == ["aten::mm", "aten::mm"]
    assert scene.column("phase") == ["backward", "backward"]


def test_sequence_numbers_begin_anew_in_each_step() -> None:
    scene = Scene()
    for step, name in enumerate(("first", "second")):
        at = 1000 * step
        scene.range(name, (at, at + 50)).op("aten::mul", (at + 10, at + 20), 3)
        scene.node("MulBackward0", (at + 100, at + 150), 3).launch(at + 120, AUTOGRAD)
    assert scene.column("module") == ["first", "second"]


def test_backward_work_takes_the_modules_of_its_forward_op() -> None:
    scene = (
        Scene()
        .range("nn.Module: Block_0", (0, 100), kind="module")
        .range("nn.Module: Linear_3", (10, 60), kind="module")
    )
    scene.range("scores", (20, 50)).op("aten::mm", (30, 40), 4)
    scene.node("MmBackward0", (200, 300), 4).launch(250, AUTOGRAD)
    assert scene.column("module") == ["Linear_3"]
    assert scene.column("path") == ["Block_0/Linear_3/scores"]


def test_an_engine_call_without_a_number_goes_by_the_node_inside() -> None:
    """NVTX numbers only the node; the sum over a broadcast dimension is launched by the engine after it."""
    scene = (
        Scene()
        .range("softmax", (0, 20))
        .op("aten::div", (5, 10), 6)
        .range("values", (20, 40))
        .op("aten::bmm", (25, 30), 7)
    )
    scene.node("autograd::engine::evaluate_function: BmmBackward0", (90, 99)).node("BmmBackward0", (91, 98), 7)
    scene.node("autograd::engine::evaluate_function: DivBackward0", (100, 200)).node("DivBackward0", (110, 150), 6)
    assert scene.launch(170, AUTOGRAD).column("module") == ["softmax"]


def test_a_gradient_is_accumulated_for_the_node_before() -> None:
    scene = Scene().range("ffn", (0, 50)).op("aten::mm", (10, 20), 4)
    scene.node("MmBackward0", (100, 150), 4).op("torch::autograd::AccumulateGrad", (160, 200), thread=AUTOGRAD)
    scene.launch(170, AUTOGRAD)
    assert (scene.column("module"), scene.column("phase")) == (["ffn"], ["backward"])


def test_checkpointing_is_recomputation_and_not_forward_nor_backward() -> None:
    scene = (
        Scene().range("block", (0, 50)).op("CheckpointFunction", (5, 45), 10).op("aten::mm", (10, 20), NO_ID).launch(15)
    )
    scene.node("CheckpointFunctionBackward", (100, 500), 10)
    scene.op("aten::mm", (120, 140), 30, AUTOGRAD).launch(130, AUTOGRAD)  # again, with autograd recording
    scene.node("MmBackward0", (200, 300), 30).op("aten::mm", (210, 220), thread=AUTOGRAD).launch(215, AUTOGRAD)
    assert scene.column("phase") == ["forward", "recompute", "backward"]
    # the last one's by two steps: to the recomputation, and from there to the first forward
    assert scene.column("module") == ["block", "block", "block"]


def test_an_optimizer_step_in_a_gradient_hook_is_optimizer() -> None:
    scene = Scene().node("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", (0, 100))
    scene.range("Optimizer.step#AdamW.step", (10, 90), AUTOGRAD).launch(50, AUTOGRAD)
    assert scene.column("phase") == ["optimizer"]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward", "forward"), ("flopwise.forward", "forward"), ("loss", "loss"), ("Backward", "backward"),
        ("backward_pass", "backward"), ("optimizer", "optimizer"), ("Optimizer.step#AdamW.step", "optimizer"),
        ("Optimizer.zero_grad#SGD.zero_grad", "optimizer"), ("zero_grad", "optimizer"), ("forward_hook", "other"),
        ("ProfilerStep#3", "other"),
    ],
)  # fmt: skip
def test_ranges_name_phases(name: str, phase: str) -> None:
    assert Scene().range(name, (0, 100)).node("MulBackward0", (900, 901)).launch(50).column("phase") == [phase]


def test_another_threads_backward_range_counts_only_for_threads_without_ops() -> None:
    scene = Scene().range("backward", (0, 100)).launch(50, AUTOGRAD).launch(150, AUTOGRAD)
    scene.op("aten::copy_", (40, 70), thread=3).launch(60, thread=3)  # a data loader's thread, say
    scene.node("MulBackward0", (900, 901), thread=4)
    assert scene.column("phase") == ["backward", "other", "other"]


def test_without_ranges_ops_tell_the_phase() -> None:
    scene = Scene().op("aten::mm", (0, 10), 1).launch(5).op("aten::cross_entropy_loss", (20, 40), 2).launch(30)
    scene.node("MmBackward0", (100, 110), 1).launch(105, AUTOGRAD).launch(120, AUTOGRAD)
    scene.op("aten::_foreach_mul_", (200, 210)).launch(205).op("aten::copy_", (300, 310)).launch(305)
    assert scene.column("phase") == ["forward", "loss", "backward", "backward", "optimizer", "other"]


def test_inference_is_forward() -> None:
    assert Scene().op("aten::mm", (0, 10)).launch(5).column("phase") == ["forward"]


def test_the_loss_inside_the_forward_range_is_loss() -> None:
    scene = Scene().range("forward", (0, 100)).op("aten::cross_entropy_loss", (10, 40), 2).launch(20)
    scene.launch(50, kernel="void nll_loss_forward_reduce_cuda_kernel_2d<float>(float*)").launch(60)
    assert scene.column("phase") == ["loss", "loss", "forward"]


def test_compiled_graphs_are_modules() -> None:
    scene = Scene().op("Torch-Compiled Region: 0/0", (0, 100)).op("CompiledFunction", (10, 90), 5)
    scene.range("## Call CompiledFxGraph fabc ##", (20, 80)).op("triton_poi_fused_mul_0", (30, 40))
    scene.launch(35, kernel="triton_poi_fused_mul_0")
    scene.node("CompiledFunctionBackward", (200, 300), 5).range("## Call CompiledFxGraph fdef ##", (210, 290), AUTOGRAD)
    scene.launch(250, AUTOGRAD, kernel="triton_poi_fused_mul_0")
    assert scene.column("module") == ["CompiledFxGraph fabc", "CompiledFxGraph fdef"]
    assert scene.column("phase") == ["forward", "backward"]
    assert scene.column("forward_op") == [None, "CompiledFunction"]


def test_what_a_graph_holds_is_not_told_by_the_range_around_its_launch() -> None:
    adam = "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
    loss, gradient = "nll_loss_forward_reduce_cuda_kernel_2d", "nll_loss_backward_reduce_cuda_kernel_2d"
    scene = Scene().range("forward", (0, 100)).range("layers.0.attn", (40, 90)).launch(50, graph=2)
    for kernel in (adam, loss, gradient):
        scene.launch(60, kernel=kernel, graph=1)
    assert scene.column("attributed") == ["graph"] * 5
    assert scene.column("phase") == ["other", "other", "optimizer", "loss", "other"]
    assert scene.column("module") == [None] * 5
    assert scene.column("replayed") == [True] * 5
    coverage = scene.attributed().coverage
    assert (coverage.launch, coverage.phase, coverage.module, coverage.range) == (1, pytest.approx(2 / 5), 0, 0)


def test_a_graph_launched_by_an_op_holds_what_the_op_does() -> None:
    scene = Scene().range("forward", (0, 100)).op("## Call CompiledFxGraph f7 ##", (40, 90)).launch(50, graph=2)
    assert scene.column("phase") == ["forward"] * 2
    assert scene.column("module") == ["CompiledFxGraph f7"] * 2
    assert scene.column("replayed") == [False] * 2


def test_a_graph_traced_as_one_row_is_counted() -> None:
    scene = Scene().range("forward", (0, 100))
    scene.rows["graph_launches"].append((50, 60, 7, MAIN, scene.name("cudaGraphLaunch"), 9))
    scene.rows["graph_runs"].append((200, 700, 7, 0, 0, 9))
    row = scene.attributed().table.row(0, named=True)
    assert (row["source"], row["duration_ns"]) == ("graph run", 500)
    assert (row["phase"], row["attributed"]) == ("other", "graph")


def test_kernels_launched_before_the_window_are_counted_as_such() -> None:
    scene = Scene().range("forward", (0, 100)).launch(50)
    scene.rows["kernels"].append((10_050, 10_080, 7, 0, 0, scene.name(ELEMENTWISE), 999, NO_ID))
    done = scene.attributed()
    assert done.table["attributed"].to_list() == ["launch", "unattributed"]
    assert (done.coverage.launch, done.coverage.phase, done.coverage.range) == (0.25, 0.25, 0.25)
    assert done.coverage.module == 0.0


def test_correlation_ids_are_per_process() -> None:
    scene = Scene().range("forward", (0, 100)).launch(50)
    scene.rows["kernels"].append((10_050, 10_060, 8, 0, 0, scene.name(ELEMENTWISE), 1, NO_ID))
    assert scene.column("attributed") == ["launch", "unattributed"]


def test_an_empty_trace_is_fully_covered() -> None:
    done = Scene().attributed()
    assert (len(done.table), done.coverage.launch) == (0, 1.0)


def test_a_trace_with_kernels_alone() -> None:
    scene = Scene()
    scene.rows["kernels"].append((0, 10, 7, 0, 0, scene.name("ampere_sgemm_128x64_nn"), 1, NO_ID))
    row = scene.attributed().table.row(0, named=True)
    assert (row["phase"], row["class"], row["attributed"]) == ("other", "matmul", "unattributed")
    assert (row["op"], row["module"], row["path"]) == (None, None, None)


# --- generated traces: the answers are known to the nanosecond ---


Truth = dict[str, dict[str, int]]


def generate(out: Path, *options: str) -> Truth:
    """Three steps of a model of three layers, written by a generator that keeps the books."""
    generator = HERE / ("gen_nsys.py" if out.suffix == ".sqlite" else "gen_kineto.py")
    command = [sys.executable, "-B", str(generator), str(out), "--layers", "3", "--steps", "3", *options]
    subprocess.run(command, check=True, capture_output=True)
    truth: Truth = json.loads(Path(f"{out}.truth.json").read_text())
    return truth


def spent(table: pl.DataFrame, keys: list[str]) -> dict[str, int]:
    """Nanoseconds by key, one key per row."""
    total: Counter[str] = Counter()
    for key, duration in zip(keys, table["duration_ns"], strict=True):
        total[key] += duration
    return dict(total)


TRUE_CLASS = {  # of the generators' coarse classes
    "matmul": "gemm", "softmax": "softmax", "loss": "softmax", "reduction": "reduce", "optimizer": "optimizer",
    "elementwise": "elementwise", "copy/cast": "elementwise", "embedding/index": "other",
}  # fmt: skip


def true_classes(table: pl.DataFrame) -> dict[str, int]:
    def key(name: str, kind: str) -> str:
        if name.startswith("triton_") and "softmax" not in name:
            return "triton" if kind != "other" else "unknown"
        return name.split()[0].lower() if kind == "memory" else TRUE_CLASS[kind]

    return spent(table, [key(*row) for row in table.select(pl.col("name", "class").cast(pl.String)).iter_rows()])


def true_phases(table: pl.DataFrame, merged: tuple[str, ...] = ()) -> dict[str, int]:
    """The generators count the loss as forward, and the copy of a batch as data."""
    known = {"loss": "forward", "other": "data"} | dict.fromkeys(merged, "forward")
    return spent(table, [known.get(phase, phase) for phase in table["phase"]])


def true_modules(table: pl.DataFrame, paths: dict[str, str]) -> dict[str, int]:
    return spent(table, [paths.get(module, module) for module in table["module"].cast(pl.String).fill_null("")])


def true_annotations(table: pl.DataFrame) -> dict[str, int]:
    inner = [(path or "").rpartition("/")[2] for path in table["path"].cast(pl.String)]
    return spent(table, [name if name.startswith("attn_") else "-" for name in inner])


def module_paths() -> dict[str, str]:
    """What the generator calls nn.Module number so and so; it knows nothing of the optimizer's."""
    top, _ = model_ops(4, 512, 1024, 16, 2752, 10000, 3, random.Random(0))
    found: dict[str, str] = {"AdamW.step": ""}

    def visit(node: tuple[Any, ...]) -> None:
        if len(node) == 3:
            path, kind, children = node
            found[f"{kind}_{len(found) - 1}"] = path
            for child in children:
                visit(child)

    visit(top)
    return found


def test_generated_eager_training(tmp_path: Path) -> None:
    truth = generate(tmp_path / "trace.json", "--stack", "--shapes")
    done = attribute(read_kineto(tmp_path / "trace.json"))
    assert true_phases(done.table) == truth["phase_ns"]
    assert true_classes(done.table) == truth["class_ns"]
    assert true_modules(done.table, module_paths()) == truth["module_ns"]
    assert true_annotations(done.table) == truth["ann_ns"]
    assert done.coverage.launch == 1.0


def test_generated_compiled_training(tmp_path: Path) -> None:
    truth = generate(tmp_path / "trace.json", "--mode", "compile")
    table = attribute(read_kineto(tmp_path / "trace.json")).table
    assert true_phases(table) == truth["phase_ns"]
    assert true_classes(table) == truth["class_ns"]
    forward = table.filter(pl.col("phase").is_in(["forward", "loss"]))
    assert forward["module"].cast(pl.String).str.starts_with("CompiledFxGraph fal4xpiah2v6").all()


def test_generated_cuda_graph(tmp_path: Path) -> None:
    """One call launches forward and backward: a trace of the replay alone cannot tell them apart."""
    truth = generate(tmp_path / "trace.json", "--mode", "cudagraph")
    done = attribute(read_kineto(tmp_path / "trace.json"))
    replayed = done.table.filter("replayed")
    assert set(replayed["phase"]) == {"other", "loss"}
    assert replayed["module"].null_count() == replayed.height
    seen = true_phases(done.table.filter(~pl.col("replayed")))
    assert seen == {phase: truth["phase_ns"][phase] for phase in ("data", "optimizer")}
    assert true_classes(done.table) == truth["class_ns"]
    replayed = done.table.filter(pl.col("attributed") == "graph")["duration_ns"].sum()
    assert replayed == truth["phase_ns"]["forward"] + truth["phase_ns"]["backward"]


@pytest.mark.parametrize("options", [("--emit-nvtx",), ("--emit-nvtx", "--textid"), ()])
def test_generated_nsys_training(tmp_path: Path, options: tuple[str, ...]) -> None:
    truth = generate(tmp_path / "trace.sqlite", *options)
    table = attribute(read_nsys(tmp_path / "trace.sqlite")).table
    assert true_phases(table) == truth["phase_ns"]
    assert true_classes(table) == truth["class_ns"]
    if options:  # without op ranges nothing leads from the autograd thread back to a module
        assert true_modules(table, {}) == truth["module_ns"]
        assert true_annotations(table) == truth["ann_ns"]


def test_generated_nsys_graph_is_known_by_the_capture_of_its_nodes(tmp_path: Path) -> None:
    truth = generate(tmp_path / "trace.sqlite", "--graph", "node")
    table = attribute(read_nsys(tmp_path / "trace.sqlite")).table
    assert true_phases(table) == truth["phase_ns"]
    assert true_classes(table) == truth["class_ns"]
    forward = table.filter(pl.col("phase").is_in(["forward", "loss"]))
    assert {"layers.2.ffn.w1", "token_emb", "lm_head"} <= set(forward["module"].cast(pl.String))
    assert set(forward["attributed"]) == {"graph"}


def test_generated_nsys_graph_without_nodes_is_one_row_per_launch(tmp_path: Path) -> None:
    generate(tmp_path / "trace.sqlite", "--graph", "graph")
    table = attribute(read_nsys(tmp_path / "trace.sqlite")).table
    assert table["source"].to_list().count("graph run") == 3
    assert set(table.filter(pl.col("source") == "graph run")["attributed"]) == {"graph"}


# --- real traces ---


def shares(done: Attribution, column: str) -> dict[str, float]:
    total = done.table["duration_ns"].sum()
    sums = done.table.group_by(pl.col(column).cast(pl.String)).agg(pl.col("duration_ns").sum())
    return {name: 100 * ns / total for name, ns in sums.iter_rows()}


@pytest.fixture(scope="module")
def two_views() -> tuple[Attribution, Attribution]:
    """The same two training steps on an H200, seen by both profilers."""
    stem = "h200-small-fp32-naive-2steps"
    traces = read_kineto(FIXTURES / f"{stem}.kineto.json.gz"), read_nsys(FIXTURES / f"{stem}.nsys.sqlite.gz")
    return attribute(traces[0]), attribute(traces[1])


@pytest.mark.parametrize("column", ["phase", "class", "module"])
def test_both_profilers_tell_the_same_story(two_views: tuple[Attribution, Attribution], column: str) -> None:
    one, other = (shares(done, column) for done in two_views)
    assert one.keys() == other.keys()
    assert max(abs(one[name] - other[name]) for name in one) < 0.2  # points


def test_both_profilers_agree_kernel_by_kernel(two_views: tuple[Attribution, Attribution]) -> None:
    """In order of start; only the names are demangled differently."""
    kernels = [done.table.filter(pl.col("source") == "kernel") for done in two_views]
    assert [len(table) for table in kernels] == [3798, 3798]
    for column in ("op", "forward_op", "path", "phase", "class"):
        one, other = (table[column].cast(pl.String) for table in kernels)
        assert one.ne_missing(other).sum() == 0, column


@pytest.mark.parametrize("which", [0, 1])
def test_real_training_is_covered(two_views: tuple[Attribution, Attribution], which: int) -> None:
    coverage = two_views[which].coverage
    assert (coverage.launch, coverage.op, coverage.phase) == (1.0, 1.0, 1.0)
    assert coverage.module >= 0.95


def test_backward_of_naive_attention_is_attention(two_views: tuple[Attribution, Attribution]) -> None:
    table = two_views[0].table.filter(pl.col("phase") == "backward")
    parts = set(table["path"].cast(pl.String).drop_nulls())
    assert parts == {"attention", "attention/attn_scores", "attention/attn_softmax", "attention/attn_pv", "ffn"}


def test_real_compiled_training_is_covered() -> None:
    done = attribute(read_kineto(FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"))
    assert (done.coverage.launch, done.coverage.phase) == (1.0, 1.0)
    assert done.coverage.module >= 0.95
    assert set(shares(done, "phase")) == {"forward", "loss", "backward", "optimizer"}
    assert "other" not in shares(done, "class")
