"""Levers from outside: a user's own step runs under them, computes the same, and what cannot be is said in one line."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from flopwise.capture.applied_levers import AppliedLevers
from flopwise.capture.build import build_step
from flopwise.capture.built_objects import BuiltObjects
from flopwise.capture.step import capture_failure
from flopwise.errors import Unsupported
from flopwise.patch.compiling import compile_torch_modules
from flopwise.patch.optimizer import fuse_optimizer, make_capturable
from flopwise.predict.dry.run import dry_run
from flopwise.records.run import UNSUPPORTED
from flopwise.spec.workload import Sampling, Trial, workload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def findable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    torch.compiler.reset()
    counters.clear()


@pytest.fixture
def quick_compiler(monkeypatch):
    """The compiler without code generation."""
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: original(function, backend="aot_eager"))


def run(name, steps=3, **levers):
    """The step, run a few times; the losses it had; what it says it was."""
    import steps as own

    step = build_step(workload(f"py:steps:{name}", **levers), CPU)
    for _ in range(steps):
        for phase in step.phases.values():
            phase()
    return step, list(own.seen.get("losses", [])), dict(own.seen)


def test_without_levers_the_step_is_as_it_was_written():
    step, losses, seen = run("transformer")
    ran = step.ran()
    assert step.model is seen["model"]
    assert (ran.parameters, ran.weights, ran.compute) == (
        sum(p.numel() for p in seen["model"].parameters()),
        "fp32",
        "",
    )
    assert (ran.optimizer, ran.checkpointed) == ("AdamW loop", 0)
    assert losses[-1] < losses[0]
    assert "forward" not in seen["model"].layers[0].__dict__


def test_bf16_is_autocast_around_forward_and_loss_but_not_around_backward_and_optimizer():
    step, losses, seen = run("transformer", precision="bf16")
    assert set(seen["dtypes"]) == {torch.bfloat16}
    assert step.ran().compute == "bf16"
    assert losses == pytest.approx(run("transformer")[1], rel=1e-2)
    casting = []
    phases = {
        name: lambda: casting.append(torch.is_autocast_enabled("cpu")) for name in ("forward", "backward", "optimizer")
    }
    from flopwise.spec.recipe import Recipe

    for phase in AppliedLevers(Recipe(precision="bf16"), BuiltObjects(), CPU).apply(phases).values():
        phase()
    assert casting == [True, False, False]


def test_a_step_of_one_piece_is_autocast_as_a_whole():
    assert set(run("transformer_in_one", precision="bf16")[2]["dtypes"]) == {torch.bfloat16}


def test_fp16_wants_a_loss_scaler():
    with pytest.raises(Unsupported, match="needs a loss scaler"):
        run("transformer", precision="fp16")
    _, losses, seen = run("transformer_with_scaler", precision="fp16")
    assert set(seen["dtypes"]) == {torch.float16}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["transformer", "transformer_sgd"])
def test_a_fused_optimizer_takes_the_same_steps(name):
    step, losses, seen = run(name, optimizer="fused")
    assert seen["optimizer"].param_groups[0]["lr"] == 3e-3
    assert step.ran().optimizer.endswith(" fused")
    assert losses == pytest.approx(run(name)[1], rel=1e-5)


def test_an_optimizer_that_has_made_steps_keeps_its_count():
    weight = nn.Parameter(torch.ones(3))
    plain, fused = (torch.optim.AdamW([nn.Parameter(weight.detach().clone())], lr=0.1) for _ in range(2))
    for number in range(4):
        if number == 2:
            fuse_optimizer(fused)
            make_capturable(fused)  # on the CPU it only marks: torch steps so on a GPU alone
            fused.param_groups[0]["capturable"] = False
        for one in (plain, fused):
            one.param_groups[0]["params"][0].grad = torch.full((3,), float(number + 1))
            one.step()
    torch.testing.assert_close(plain.param_groups[0]["params"], fused.param_groups[0]["params"])


def test_an_optimizer_of_ones_own_is_not_fused():
    with pytest.raises(Unsupported, match="does not know Plain"):
        run("own_optimizer", optimizer="fused")
    with pytest.raises(Unsupported, match="found no optimizer"):
        run("matmul", optimizer="fused")
    assert run("own_optimizer")[0].ran().optimizer == "Plain"


def test_checkpointing_computes_every_block_again_and_the_same():
    step, losses, seen = run("transformer", checkpoint=1)
    assert losses == pytest.approx(run("transformer")[1])
    assert step.ran().checkpointed == 4
    step, _, seen = run("transformer", steps=0, checkpoint=1)
    runs = []
    seen["model"].layers[2].out.register_forward_pre_hook(lambda *_: runs.append(1))
    for phase in step.phases.values():
        phase()
    assert len(runs) == 2


def test_attention_is_held_to_a_backend():
    from torch.backends.cuda import flash_sdp_enabled, math_sdp_enabled

    assert run("transformer", attention="sdpa-flash")[1] == pytest.approx(run("transformer")[1], rel=1e-5)
    assert math_sdp_enabled()
    assert flash_sdp_enabled()


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.slow
def test_compiled_blocks_are_one_graph_and_the_whole_is_another():
    expected = run("transformer")[1]
    step, losses, _ = run("transformer", compile="blocks")
    assert counters["stats"]["unique_graphs"] == 1
    assert step.model is not None
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.compiler.reset()
    step, losses, seen = run("transformer", compile="default")
    assert seen["model"]._compiled_call_impl is not None
    assert step.model is None
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("compiled", "graphs"), [("default", 2), ("blocks", 1)])
def test_torchs_own_modules_are_compiled_and_stay_what_they_are(compiled, graphs):
    expected = run("torchs_own")[1]
    _, losses, seen = run("torchs_own", compile=compiled)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert counters["stats"]["unique_graphs"] == graphs
    model = seen["model"]
    assert list(model.state_dict()) == seen["keys"]
    calls = []
    model.register_forward_hook(lambda *_: calls.append("after"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model(torch.ones(16, 8))
    assert calls == ["before", "after"]


@pytest.mark.slow
def test_modules_of_torchs_own_that_differ_have_graphs_of_their_own_with_fixed_shapes():
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in inputs])
        return graph

    layers = [nn.Sequential(nn.Linear(4, 4), *(nn.ReLU() for _ in range(n))) for n in range(10)]
    compile_torch_modules(layers, backend=backend)
    for rows, layer in enumerate(layers, 2):
        layer(torch.ones(rows, 4))
    assert shapes == [[(4, 4), (4,), (rows, 4)] for rows in range(2, 12)]


@pytest.mark.usefixtures("quick_compiler")
def test_torchs_own_blocks_are_recomputed_and_compiled():
    step, losses, _ = run("torchs_own", compile="blocks", checkpoint=1)
    assert step.ran().checkpointed == 9
    assert losses == pytest.approx(run("torchs_own")[1], rel=1e-5)


@pytest.mark.usefixtures("quick_compiler")
def test_levers_go_together():
    step, losses, _ = run("transformer", compile="blocks", checkpoint=1, precision="bf16", optimizer="fused")
    assert losses == pytest.approx(run("transformer")[1], rel=2e-2)
    ran = step.ran()
    assert (ran.compute, ran.optimizer, ran.checkpointed) == ("bf16", "AdamW fused", 4)


@pytest.mark.parametrize(
    ("name", "levers", "line"),
    [
        ("matmul", {"compile": "default"}, "found no module"),
        ("matmul", {"compile": "blocks"}, "found no module"),
        ("matmul", {"checkpoint": 1}, "found no module"),
        ("no_blocks", {"compile": "blocks"}, "found no blocks"),
        ("no_blocks", {"checkpoint": 1}, "found no blocks"),
        ("already_compiled", {"compile": "default"}, "compiles its own modules already"),
        ("calls_forward", {"compile": "default"}, "compiled nothing: the step calls no module"),
        ("recurrent", {"compile": "default"}, "compiled nothing: the compiler takes none"),
        ("transformer", {"precision": "tf32"}, "needs an NVIDIA GPU"),
        ("transformer", {"graph": "on"}, "needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_applied_is_said_in_one_line(name, levers, line):
    with pytest.raises(Unsupported, match=line) as refused:
        run(name, **levers)
    assert refused.value.hint


def test_a_compiler_that_breaks_is_a_clear_line(monkeypatch):
    original = nn.Module.compile

    def broken(graph, inputs):
        raise ValueError("no code for this")

    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: original(self, backend=broken))
    with pytest.raises(Unsupported, match=r"compile = 'default' fails on this step: .*no code for this") as refused:
        run("transformer", compile="default")
    assert isinstance(refused.value.__cause__, BackendCompilerFailed)


def test_an_error_of_the_steps_own_stays_its_own():
    with pytest.raises(ValueError, match="luck"):
        run("raises", precision="bf16")


def test_the_model_is_the_one_that_is_updated_not_the_largest():
    found = BuiltObjects()
    with found.watching():
        large, small = nn.Linear(9, 9), nn.Linear(2, 2)
        assert found.model is large
        optimizer = torch.optim.SGD(small.parameters())
        assert found.model is small
        del optimizer
    assert found.model is large


def test_what_is_built_is_found_and_not_kept_alive():
    found, before = BuiltObjects(), nn.Module.__init__
    with found.watching():
        kept = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        criterion = nn.CrossEntropyLoss()
        nn.Linear(9, 9)
        optimizer = torch.optim.SGD(kept.parameters())
        torch.amp.GradScaler("cpu", enabled=False)
    nn.Linear(3, 3)
    assert found.roots == [kept, criterion]
    assert found.model is kept
    assert found.optimizers == [optimizer]
    assert not found.scales_losses
    assert nn.Module.__init__ is before
    del kept, optimizer
    assert found.model is None


def test_why_a_capture_failed_is_its_first_error():
    hidden = RuntimeError("operation failed due to a previous error during capture")
    hidden.__context__ = RuntimeError("operation not permitted when stream is capturing")
    failure = capture_failure(hidden)
    assert isinstance(failure, Unsupported)
    assert "not permitted when stream is capturing" in failure.message
    hidden.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert isinstance(capture_failure(hidden), torch.OutOfMemoryError)


def test_the_dry_run_takes_the_levers():
    plain, changed = dry_run(workload("py:steps:trains")), dry_run(workload("py:steps:trains", precision="bf16"))
    assert {op.dtype for op in plain.ops if op.op in ("mm", "addmm")} == {"fp32"}
    assert {op.dtype for op in changed.ops if op.op in ("mm", "addmm")} == {"bf16"}
    fewer = dry_run(workload("py:steps:trains", optimizer="fused"))
    assert sum(op.kernels for op in fewer.ops) < sum(op.kernels for op in plain.ops)


def test_a_lever_that_cannot_be_is_a_row(worker):
    asked = workload("py:steps:matmul", compile="blocks")
    point = worker.run(Trial(workload=asked, sampling=Sampling(warmup=0, samples=2), device="cpu"))
    assert point.status == UNSUPPORTED
    assert "found no module" in point.reason
