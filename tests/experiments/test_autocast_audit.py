"""autocast-audit: what is found under CUDA's rules is what CUDA's list says; any model can be audited; the verdict follows."""

import sys

import pytest
import torch
from made_rows import measured
from torch import nn

from flopwise.errors import Unsupported
from flopwise.experiments.autocast_rows import CUDA_RULES, FOLLOWS, KEPT, LOWERED, OWN, OWN_RULES
from flopwise.experiments.autocast_watch import Watch
from flopwise.experiments.claims.autocast_audit import CLAIMED, EXPERIMENT, TOY, modules_of
from flopwise.predict.dry.cuda_autocast import cuda_autocast
from flopwise.records.experiment import Place
from flopwise.render.lab_charts import picture_chart
from flopwise.spec.workload import workload

CPU, GPU = Place(device="cpu"), Place(device="cuda:0")

OWN_STEP = """
import torch
def make(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, device=device)).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss
    return step
"""


@pytest.fixture(scope="module")
def rows():
    return measured(EXPERIMENT)


def part(rows, name):
    return [row for row in rows if row["part"] == name]


def as_on_a_gpu(rows):
    """The rows under CUDA's rules as a GPU would give them."""
    return [{**row, "rules": OWN_RULES} for row in rows if row["rules"] == CUDA_RULES]


def toy(rows, precision, rules=CUDA_RULES):
    return [r for r in rows if (r["model"], r["rules"], r["precision"]) == (TOY, rules, precision)]


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_the_courses_model_has_the_known_dtypes(rows, half):
    found = toy(rows, half)
    assert {r["module"]: r["dtype"] for r in part(found, "module")} == {
        "": half,
        "fc1": half,
        "relu": half,
        "ln": "fp32",
        "fc2": half,
    }
    assert {r["what"]: r["dtype"] for r in part(found, "whole")} == dict.fromkeys(
        ("parameters", "gradients", "loss"), "fp32"
    )
    assert {r["module"]: r["gradient_dtype"] for r in part(found, "module")}["ln"] == "fp32"


def test_what_autocast_does_is_found_by_asking(rows):
    found = {r["op"]: r["treatment"] for r in part(as_on_a_gpu(rows), "call")}
    assert found["linear"] == found["scaled_dot_product_attention"] == LOWERED
    assert found["layer_norm"] == found["rms_norm"] == found["cross_entropy"] == KEPT
    assert found["relu"] == found["add"] == found["embedding"] == FOLLOWS
    assert found["float"] == OWN


def test_asking_changes_nothing():
    """A batch norm that is asked keeps its running mean, and the gradients are those of the step alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)

    def run():
        model.zero_grad()
        model[1].reset_running_stats()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).float().pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]

    plain = run()
    with Watch(model, "bf16") as watch:
        watched = run()
    assert watch.modules
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_cuda_rules_on_the_cpu_end_with_the_audit(rows):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.LayerNorm(4)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.LayerNorm(4)(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_it_can_be_confirmed_refuted_and_left_open(rows, pure):
    here = pure(EXPERIMENT, rows, CPU)
    assert here.word == "refuted here"  # a CPU's autocast lowers layer norms
    assert "layer_norm gives bf16" in here.why
    assert "as this torch has them, applied on the CPU, it is as claimed" in here.why
    assert pure(EXPERIMENT, as_on_a_gpu(rows), GPU).word == "confirmed"
    low = [{**r, "dtype": "bf16"} if r.get("what") == "gradients" else r for r in as_on_a_gpu(rows)]
    assert "gradients in bf16" in pure(EXPERIMENT, low, GPU).why
    wide = [{**r, "dtype": "fp32"} if r.get("op") == "linear" else r for r in as_on_a_gpu(rows)]
    assert pure(EXPERIMENT, wide, GPU).word == "refuted here"
    none = [r for r in as_on_a_gpu(rows) if r["part"] == "whole"]
    assert pure(EXPERIMENT, none, GPU).word == "inconclusive"


def test_like_blocks_are_one_row_and_the_two_precisions_stand_beside_each_other(rows):
    typed = EXPERIMENT.read(rows)
    blocks = [r for r in modules_of(typed) if r["module"] == "blocks.*.mlp.up"]
    assert {(r["precision"], r["count"]) for r in blocks} == {("fp16", 2), ("bf16", 2)}
    title = f"every module's output: tiny, {CUDA_RULES}"
    table = next(table for table in EXPERIMENT.tabulate(typed, CPU) if table.title == title)
    row = next(r for r in table.rows if r["module"] == "head")
    assert (row["fp16_dtype"], row["bf16_dtype"]) == ("fp16", "bf16")


def test_a_step_of_the_users_own_and_an_operation(tmp_path, monkeypatch, pure):
    (tmp_path / "own_audited.py").write_text(OWN_STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rows = measured(EXPERIMENT, workload=workload("py:own_audited:make"))
    assert part(rows, "refused") == []  # it has no loss scaler, and an audit needs none
    assert {r["op"] for r in part(rows, "call")} == {"linear", "softmax", "pow", "sum"}  # and not its optimizer's
    found = {(r["rules"], r["precision"], r["op"]): r["dtype"] for r in part(rows, "call")}
    assert found[CUDA_RULES, "fp16", "linear"] == "fp16"
    assert found[CUDA_RULES, "fp16", "softmax"] == "fp32"
    assert "softmax gives" in pure(EXPERIMENT, rows, CPU).why  # by the CPU's own rules
    with pytest.raises(Unsupported, match="is an operation"):
        measured(EXPERIMENT, workload=workload("op:gelu"))


def test_what_autocast_does_counts_and_not_what_came_out_here(rows, pure):
    """A norm that is left to its inputs gives fp32 where these are: the claim is not true of it all the same."""
    on_gpu = as_on_a_gpu(rows)
    left = [{**r, "treatment": FOLLOWS} if r.get("op") == "rms_norm" else r for r in on_gpu]
    found = pure(EXPERIMENT, left, GPU)
    assert found.word == "refuted here"
    assert "rms_norm is left to the dtype of its inputs, fp32 here" in found.why
    halves = [{**r, "dtype": r["precision"]} if r["part"] == "module" else r for r in on_gpu]
    assert pure(EXPERIMENT, halves, GPU).word == "refuted here"
    bare = [r for r in on_gpu if r.get("op") not in CLAIMED]
    assert pure(EXPERIMENT, bare, GPU).word == "inconclusive"


def test_a_word_has_one_colour_in_all_charts(rows):
    charts = [picture_chart(picture).to_dict() for picture in EXPERIMENT.draw(EXPERIMENT.read(rows), CPU)]
    scales = [chart["spec"]["layer"][0]["encoding"]["color"]["scale"] for chart in charts]
    assert len({tuple(zip(scale["domain"], scale["range"], strict=True)) for scale in scales}) == 1
