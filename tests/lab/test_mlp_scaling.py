"""mlp-scaling: what hides the work is told by the clocks, not by the wall alone."""

import pytest
import torch

from flopwise.lab.bench import Bench
from flopwise.lab.experiment import Place
from flopwise.lab.experiments.mlp_scaling import AXES, EXPERIMENT, Mlp, growths, measure, tabulate

GPU, CPU = Place(device="cuda:0"), Place(device="cpu")


def made(wall, gpu, layers=5.0):
    """At 5 × batch and width the wall and the GPU's clock have grown by this; steps by 5, layers by `layers`."""
    rows = []
    for axis in AXES:
        grown = {"steps": (5.0, 5.0), "layers": (layers, layers)}.get(axis, (wall, gpu))
        for factor in (1, 5):
            by_wall, by_gpu = grown if factor == 5 else (1.0, 1.0)
            rows.append(
                {"axis": axis, "factor": factor, "work_flops": Mlp().scaled(axis, factor).flops(),
                 "wall_ns": 1e6 * by_wall, "launch_ns": 0.9e6 * by_wall, "gpu_ns": 2e5 * by_gpu, "graph_ns": 2.1e5 * by_gpu}
            )  # fmt: skip
    return rows


def test_flat_on_both_clocks_is_parallelism(pure):
    yes = pure(EXPERIMENT, made(wall=1.02, gpu=1.1), GPU)
    assert yes.word == "confirmed"
    assert "5 × batch (5 × the work): wall × 1.02, GPU alone × 1.10" in yes.why
    assert "5 × width (25 × the work)" in yes.why
    assert "flat by launch overhead, and without it by parallelism" in yes.why  # the GPU works for 22 % of the time


def test_flat_on_the_wall_alone_is_launch_overhead(pure):
    no = pure(EXPERIMENT, made(wall=1.02, gpu=4.0), GPU)
    assert no.word == "refuted here"
    assert "launch overhead" in no.why
    assert "GPU at work 20 → 78 % of the time" in no.why
    assert {row["axis"]: row["why"] for row in growths(made(wall=1.02, gpu=4.0))}["batch"] == "flat by launch overhead"


def test_what_grows_is_not_flat_and_layers_must_grow(pure):
    no = pure(EXPERIMENT, made(wall=4.0, gpu=6.0), GPU)
    assert no.word == "refuted here"
    assert "not flat" in no.why
    assert pure(EXPERIMENT, made(wall=1.02, gpu=1.1, layers=1.5), GPU).word == "refuted here"
    assert pure(EXPERIMENT, [row for row in made(1.0, 1.0) if row["axis"] != "width"], GPU).word == "inconclusive"


def test_flops_are_those_of_its_matmuls():
    from torch.utils.flop_counter import FlopCounterMode

    from flopwise.lab.experiments.mlp_scaling import _runs

    mlp = Mlp(steps=2, layers=3, batch=8, width=16)
    with FlopCounterMode(display=False) as counted:
        _runs(Bench(torch.device("cpu")), mlp)()
    assert counted.get_total_flops() == mlp.flops()
    assert Mlp().scaled("width", 5).flops() == 25 * Mlp().flops()
    assert Mlp().scaled("batch", 5).flops() == pytest.approx(5 * Mlp().flops())


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr("flopwise.lab.experiments.mlp_scaling.Mlp", lambda: Mlp(batch=8, width=16))
    rows = list(measure(Bench(torch.device("cpu"), quick=True)))
    assert [(row["axis"], row["factor"]) for row in rows] == [(axis, factor) for axis in AXES for factor in (1, 3)]
    assert rows[0]["wall_ns"] == rows[2]["wall_ns"]  # one base for all
    assert pure(EXPERIMENT, rows, CPU).why
    assert "gpu_ns" not in tabulate(rows, CPU)[0].columns
