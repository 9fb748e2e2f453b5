"""launch-overhead: the verdict follows the rows; a run on the CPU says that there is nothing to launch."""

import pytest
from made_rows import measured, timed

from flopwise.experiments.claims.launch_overhead import ALONE, EMPTY, EXPERIMENT, GRAPH, LARGE, QUEUED
from flopwise.records.experiment import Place

GPU = Place(device="cuda:0")


def made(graph_ns=500.0, gpu_ns=1000.0, at=(1, 2048), empty_ns=4000.0, large_launch_ns=4000.0):
    """Rows of a GPU whose launches take 4 µs, and whose adds take 1 µs; the adds of `at` take gpu_ns, and graph_ns in a graph."""
    rows = [{"how": EMPTY, "n": 0, "moved_bytes": 0, **timed(5000.0, launch_ns=empty_ns, gpu_ns=900.0)}]
    for n in (1, 2048, LARGE):
        work = 20_000.0 if n == LARGE else gpu_ns if n in at else 1000.0
        in_graph = work if n == LARGE else graph_ns if n in at else 500.0
        launch = large_launch_ns if n == LARGE else 4000.0
        for how, wall in ((ALONE, 12_000.0 + work), (QUEUED, max(5000.0, work)), (GRAPH, in_graph)):
            clocks = timed(wall, launch_ns=launch, gpu_ns=work)
            rows.append({"how": how, "n": n, "moved_bytes": 12 * n, **clocks})
    return rows


def test_it_can_be_confirmed_and_refuted(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "4.00 µs" in yes.why
    assert "Of an add of 2048 numbers that is waited for, at least 92 % is not the GPU's work" in yes.why
    assert "90 % saved" in yes.why


@pytest.mark.parametrize("at", [(1,), (2048,)])
def test_each_small_add_counts(pure, at):
    assert pure(EXPERIMENT, made(graph_ns=4900.0, at=at), GPU).word == "refuted here"  # the graph saves nothing
    assert pure(EXPERIMENT, made(gpu_ns=30_000.0, at=at), GPU).word == "refuted here"  # the GPU's work, not the launch


def test_a_launch_of_milliseconds_or_one_that_grows_refutes(pure):
    assert pure(EXPERIMENT, made(empty_ns=5e6), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made(large_launch_ns=40_000.0), GPU).word == "refuted here"


def test_a_part_of_the_evidence_is_left_open(pure):
    left = pure(EXPERIMENT, made()[:-1], GPU)
    assert left.word == "inconclusive"
    assert f"not measured: adds in a CUDA graph of {LARGE}" in left.why
    assert pure(EXPERIMENT, [row for row in made() if row["n"] != 2048], GPU).word == "inconclusive"


def test_unsteady_times_decide_nothing(pure):
    rows = [{**row, "wall_low_ns": 0.02 * row["wall_ns"], "wall_high_ns": 10 * row["wall_ns"]} for row in made()]
    left = pure(EXPERIMENT, rows, GPU)
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: adds, queued, 1 takes 5.00 µs" in left.why


def test_its_pictures_and_tables_are_of_its_rows():
    rows = EXPERIMENT.read(made())
    assert [picture.y.field for picture in EXPERIMENT.draw(rows, GPU)] == ["wall_ns", "host_share"]
    assert "gpu_ns" in EXPERIMENT.tabulate(rows, GPU)[0].keys


def test_a_quick_run_on_the_cpu(pure):
    rows, place = measured(EXPERIMENT), Place(device="cpu")
    verdict = pure(EXPERIMENT, rows, place)
    assert verdict.word == "not measurable here"
    assert "2048 × 2048" in verdict.why
    typed = EXPERIMENT.read(rows)
    assert EXPERIMENT.draw(typed, place)
    assert "gpu_ns" not in EXPERIMENT.tabulate(typed, place)[0].keys
