"""mlp-scaling: what hides the work is told by the clocks, not by the wall alone."""

import pytest
import torch
from made_rows import measured, on_the_wall, timed
from torch.utils.flop_counter import FlopCounterMode

from flopwise.experiments.bench import Bench
from flopwise.experiments.claims.mlp_scaling import AXES, EXPERIMENT, Mlp, growths, training
from flopwise.records.experiment import Place

GPU, CPU = Place(device="cuda:0"), Place(device="cpu")


def made(wall, gpu, layers=1.0, steps=1.0, factors=(1, 3, 5), **at_three):
    """At 5 × batch and width the wall and the GPU's clock have grown by this, at 3 × by half of that; steps and layers
    by so many times what they should. `at_three`: another growth of an axis at 3 ×.
    """
    rows = []
    for axis in AXES:
        for factor in factors:
            share = (factor - 1) / 4
            by_wall, by_gpu = 1 + share * (wall - 1), 1 + share * (gpu - 1)
            if axis in ("steps", "layers"):
                by_wall = by_gpu = factor * (1.0 if factor == 1 else steps if axis == "steps" else layers)
            if factor == 3:
                by_wall = at_three.get(axis, by_wall)
            about = {"axis": axis, "factor": factor, "work_flops": Mlp().scaled(axis, factor).flops()}
            clocks = timed(1e6 * by_wall, launch_ns=0.9e6 * by_wall, gpu_ns=2e5 * by_gpu, graph_ns=2.1e5 * by_gpu)
            rows.append(about | clocks)
    return rows


def on_cpu(row):
    return {**on_the_wall(row), "graph_ns": None}


def test_flat_on_both_clocks_is_parallelism(pure):
    yes = pure(EXPERIMENT, made(wall=1.02, gpu=1.1), GPU)
    assert yes.word == "confirmed"
    assert "5 × batch (5 × the work): wall × 1.02, GPU alone × 1.10" in yes.why
    assert "5 × width (25 × the work)" in yes.why
    assert "flat by launch overhead, and without it by parallelism" in yes.why  # the GPU works for 22 % of the time


def test_flat_on_the_wall_alone_is_launch_overhead(pure):
    no = pure(EXPERIMENT, made(wall=1.02, gpu=4.0), GPU)
    assert no.word == "refuted here"
    assert "GPU at work 20 → 78 % of the time" in no.why
    assert "The GPU alone does 5 × the work in 4.00 × the time and 25 × the work in 4.00 × the time" in no.why
    assert "it has little room" in no.why  # for the batch
    reasons = {axis: row.why for axis, row in growths(EXPERIMENT.read(made(wall=1.02, gpu=4.0))).items()}
    assert reasons["batch"] == "flat by launch overhead"
    assert "parallelism would do a part" in reasons["width"]


def test_launches_and_room_on_the_gpu_are_both_said(pure):
    no = pure(EXPERIMENT, made(wall=1.02, gpu=1.4), GPU)
    assert no.word == "refuted here"
    assert "Launches set the wall clock's pace (the base leaves the GPU idle for 80 % of the time)" in no.why
    assert "it has room, which is parallelism" in no.why


def test_what_grows_is_not_flat_and_layers_must_grow(pure):
    no = pure(EXPERIMENT, made(wall=4.0, gpu=6.0), GPU)
    assert no.word == "refuted here"
    assert "not flat" in no.why
    assert pure(EXPERIMENT, made(wall=1.02, gpu=1.1, layers=0.3), GPU).word == "refuted here"


def test_every_factor_counts_and_linear_has_an_upper_end(pure):
    assert pure(EXPERIMENT, made(1.02, 1.1, steps=36.0), GPU).word == "refuted here"  # 5 × the steps cost 180 ×
    hidden = pure(EXPERIMENT, made(1.02, 1.1, batch=9.0), GPU)  # 3 × the batch cost 9 ×, 5 × none
    assert hidden.word == "refuted here"
    assert "Batch or width do cost time, at some factor." in hidden.why


def test_a_part_of_the_evidence_is_left_open(pure):
    whole = made(1.02, 1.1)
    assert pure(EXPERIMENT, [row for row in whole if row["axis"] != "width"], GPU).word == "inconclusive"
    assert pure(EXPERIMENT, whole[:-1], GPU).word == "inconclusive"
    flat = pure(EXPERIMENT, [on_cpu(row) for row in whole], CPU)
    assert flat.word == "inconclusive"
    assert "Only a GPU's own clock" in flat.why


def test_two_samples_that_differ_decide_nothing(pure):
    rows = [on_cpu(row) for row in made(4.0, 4.0)]
    assert pure(EXPERIMENT, rows, CPU).word == "refuted here"
    shaky = [{**row, "wall_low_ns": 2.2e8, "wall_ns": 3.6e8, "wall_high_ns": 5e8, "samples": 2} for row in rows]
    left = pure(EXPERIMENT, shaky, CPU)
    assert left.word == "inconclusive"
    assert "360 ms, between 220 ms and 500 ms in 2 samples" in left.why


def test_bases_that_differ_leave_open_what_they_could_explain(pure):
    rows = [on_cpu(row) for row in made(1.5, 1.0)]
    assert pure(EXPERIMENT, rows, CPU).word == "refuted here"
    slow = [{**row, **timed(2e6, gpu=False)} if (row["axis"], row["factor"]) == ("steps", 1) else row for row in rows]
    left = pure(EXPERIMENT, slow, CPU)
    assert left.word == "inconclusive"
    assert "the base alone takes 1.00 ms to 2.00 ms" in left.why


def test_flops_are_those_of_its_matmuls():
    mlp = Mlp(steps=2, layers=3, batch=8, width=16)
    with FlopCounterMode(display=False) as counted:
        training(Bench(torch.device("cpu")), mlp)()
    assert counted.get_total_flops() == mlp.flops()
    assert Mlp().scaled("width", 5).flops() == 25 * Mlp().flops()
    assert Mlp().scaled("batch", 5).flops() == pytest.approx(5 * Mlp().flops())


def test_a_quick_run_on_the_cpu(pure, monkeypatch):
    monkeypatch.setattr("flopwise.experiments.claims.mlp_scaling.Mlp", lambda: Mlp(batch=8, width=16))
    rows = measured(EXPERIMENT)
    assert [(row["axis"], row["factor"]) for row in rows] == [(axis, factor) for axis in AXES for factor in (1, 3)]
    assert pure(EXPERIMENT, rows, CPU).why
    assert "gpu_ns" not in EXPERIMENT.tabulate(EXPERIMENT.read(rows), CPU)[0].keys
