"""Operations by implementation: all compute the same, a wrong one has no time, and one that cannot run is a row."""

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from flopwise.api.bench import bench  # noqa: E402
from flopwise.capture import op_step as op_steps  # noqa: E402
from flopwise.capture.model_step import ModelStep  # noqa: E402
from flopwise.capture.op_step import op_step  # noqa: E402
from flopwise.capture.trials import failure  # noqa: E402
from flopwise.errors import Unsupported, WrongResult  # noqa: E402
from flopwise.predict.dry.run import dry_run  # noqa: E402
from flopwise.records.run import OK, UNSUPPORTED, WRONG  # noqa: E402
from flopwise.render.run_view import implementations_view  # noqa: E402
from flopwise.spec.operations import OPS  # noqa: E402
from flopwise.spec.workload import workload  # noqa: E402

CPU = torch.device("cpu")
SMALL = {
    "gelu": {"rows": 8, "cols": 40},
    "softmax": {"rows": 8, "cols": 40},
    "rms_norm": {"rows": 8, "cols": 40},
    "swiglu": {"rows": 8, "cols": 40},
    "rope": {"heads": 2, "dim": 16},
    "cross_entropy": {"rows": 24, "dim": 16, "vocab": 50},
    "adamw": {"tensors": 3, "rows": 5, "cols": 7},
    "attention": {"dim": 16},
}
ELSEWHERE = ("compile", "cuda", "sdpa-cudnn", "flex")  # a compiler, a GPU, no backward on the CPU
HERE = [(op, impl) for op in SMALL for impl in OPS[op].impls if impl not in ELSEWHERE]


def asked(op, impl, **options):
    phase = {} if op == "adamw" else {"phase": "backward"}
    sizes = {"batch": 2, "context": 20} if "context" in OPS[op].takes else {}
    return workload(f"op:{op}", impl=impl, set=SMALL[op], **(phase | sizes | options))


@pytest.mark.parametrize(("op", "impl"), HERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_implementation_computes_what_the_reference_does(op, impl, precision):
    step = op_step(asked(op, impl, precision=precision), CPU)  # it compares before it hands out a step
    for _ in range(2):
        for run in step.phases.values():
            run()


@pytest.mark.parametrize("impl", [impl for impl in OPS["attention"].impls if impl not in ELSEWHERE])
def test_attention_without_a_mask_is_checked_without_one(impl, monkeypatch):
    every_key = workload("op:attention", impl=impl, batch=2, context=20, set={"dim": 16, "causal": "off"})
    op_step(every_key, CPU)
    right = op_steps.op_function
    monkeypatch.setattr(op_steps, "op_function", lambda op, impl: right(msgspec.structs.replace(op, causal=True), impl))
    with pytest.raises(WrongResult):
        op_step(every_key, CPU)


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_attention_without_a_mask_is_accounted_as_the_whole_square(attention):
    def work(**causal):
        run = dry_run(workload("op:attention", attention=attention, context=256, set=causal))
        return [op for op in run.ops if op.kind == "attention" and op.flops]

    masked, whole = work(), work(causal="off")
    assert [op.flops for op in masked] == [op.flops for op in whole]  # both by the square; a causal kernel skips half
    assert not any(op.whole for op in masked)
    assert len(whole) == 2
    assert all(op.whole for op in whole)


def test_attention_without_a_mask_masks_nothing():
    names = [op.op for op in dry_run(workload("op:attention", attention="naive", set={"causal": False})).ops]
    assert "bmm" in names
    assert not {"masked_fill", "triu"} & set(names)


@pytest.mark.parametrize("op", [op for op in SMALL if op != "adamw"])
def test_a_wrong_result_is_found_before_it_is_timed(op, monkeypatch):
    impl, right = next(i for i in OPS[op].impls if i not in ELSEWHERE), op_steps.op_function
    monkeypatch.setattr(op_steps, "op_function", lambda *a: lambda *x: right(*a)(*x) * 1.1)
    with pytest.raises(WrongResult, match=f"op:{op} by {impl}") as raised:
        op_step(asked(op, impl), CPU)
    assert failure(raised.value).status == WRONG


def test_a_wrong_gradient_is_one_too(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.nn.functional.gelu(x, approximate="tanh")

        @staticmethod
        def backward(ctx, grad):
            return grad

    monkeypatch.setattr(op_steps, "op_function", lambda *a: Wrong.apply)
    op_step(asked("gelu", "torch", phase="forward"), CPU)
    with pytest.raises(WrongResult, match="gradient 1"):
        op_step(asked("gelu", "torch"), CPU)


def test_what_needs_a_gpu_says_so():
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        op_step(asked("gelu", "cuda"), CPU)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("op", "impl"), [(op, impl) for op in SMALL for impl in OPS[op].impls if impl != "sdpa-flash"])
def test_a_dry_run_tells_of_every_implementation(op, impl):
    precision = "bf16" if impl == "sdpa-cudnn" else "fp32"
    run = dry_run(asked(op, impl, precision=precision))
    assert sum(each.kernels for each in run.ops) > 0
    if impl in ("triton", "cuda"):
        ours = [each for each in run.ops if each.op.startswith(f"flopwise::{op}")]
        assert {each.phase for each in ours} >= {"forward"}


def test_implementations_side_by_side(tmp_path):
    run = bench(
        "op:swiglu", impls=["manual", "triton"], device="cpu", samples=5, warmup=1, runs=tmp_path, set=SMALL["swiglu"]
    )
    (table,), told = implementations_view(run, {})
    assert [point.status for point in run.points] == [OK, OK]
    assert [row["impl"] for row in table.rows] == ["manual", "triton"]
    assert table.rows[0]["to_first"] == 1.0
    assert min(row["to_best"] for row in table.rows) == 1.0
    assert told["implementations"][1]["bytes_per_s"] > 0
    run = bench("op:gelu", impls=["torch", "cuda"], device="cpu", samples=5, warmup=1, runs=tmp_path, set=SMALL["gelu"])
    assert run.points[1].status == UNSUPPORTED
    (table,), _ = implementations_view(run, {})
    assert "needs an NVIDIA GPU" in table.rows[1]["status"]


def test_training_with_our_kernels_goes_as_training_without_them():
    own = {
        "attention": "flash", "norm": "triton", "activation": "triton", "rope": "triton", "loss": "fused",
        "optimizer": "flopwise",
    }  # fmt: skip
    losses = []
    for levers in ({}, own):
        torch.manual_seed(0)
        step = ModelStep(workload("tiny", batch=2, context=16, **levers), CPU)
        losses.append([])
        for _ in range(4):
            for run in step.phases().values():
                run()
            losses[-1].append(float(step.loss))
    assert losses[0][0] > losses[0][-1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert "flopwise" in step.ran().optimizer


@pytest.mark.parametrize(
    ("op", "impl", "said"),
    [
        ("gelu", "triton", "triton: written out, no GPU"),
        ("gelu", "manual", ""),
        ("attention", "flash", "flash: written out, no GPU"),
        ("cross_entropy", "fused", "fused: written out, no GPU"),
        ("adamw", "fused", ""),
        ("adamw", "flopwise-bf16", "flopwise-bf16: written out, no GPU"),
    ],
)
def test_on_the_cpu_our_kernels_are_said_to_be_written_out(op, impl, said):
    assert op_step(asked(op, impl), CPU).ran().kernels == said


def test_a_models_own_kernels_are_said_to_be_written_out_too():
    step = ModelStep(workload("tiny", batch=1, context=8, norm="triton", optimizer="flopwise"), CPU)
    assert step.ran().kernels == "norm triton, optimizer flopwise: written out, no GPU"
