"""launch-overhead: the verdict follows the rows; a run on the CPU says that there is nothing to launch."""

import torch

from flopwise.lab.bench import Bench
from flopwise.lab.experiment import Place
from flopwise.lab.experiments.launch_overhead import (
    ALONE,
    EMPTY,
    EXPERIMENT,
    GRAPH,
    LARGE,
    QUEUED,
    draw,
    measure,
    tabulate,
)

GPU = Place(device="cuda:0")


def made(graph_ns=500.0, gpu_ns=1000.0):
    """Rows of a GPU whose launches take 5 µs, and whose adds take 1 µs."""
    rows = [{"how": EMPTY, "n": 0, "moved_bytes": 0, "wall_ns": 5000.0, "launch_ns": 4000.0, "gpu_ns": 900.0}]
    for n in (1, LARGE):
        work = gpu_ns if n == 1 else 20_000.0
        for how, wall in ((ALONE, 12_000.0 + work), (QUEUED, max(5000.0, work)), (GRAPH, graph_ns if n == 1 else work)):
            rows.append(
                {"how": how, "n": n, "moved_bytes": 12 * n, "wall_ns": wall, "launch_ns": 4000.0, "gpu_ns": work}
            )
    return [{**row, "wall_low_ns": row["wall_ns"], "wall_high_ns": row["wall_ns"]} for row in rows]


def test_it_can_be_confirmed_and_refuted(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "4.00 µs" in yes.why
    assert "90 % saved" in yes.why
    assert pure(EXPERIMENT, made(graph_ns=4900.0), GPU).word == "refuted here"  # the graph saves nothing
    assert (
        pure(EXPERIMENT, made(gpu_ns=30_000.0), GPU).word == "refuted here"
    )  # the add is the GPU's work, not the launch


def test_its_pictures_and_tables_are_of_its_rows():
    assert [picture.y for picture in draw(made(), GPU)] == ["wall_ns", "host_share"]
    assert "gpu_ns" in tabulate(made(), GPU)[0].columns


def test_a_quick_run_on_the_cpu(pure):
    rows = list(measure(Bench(torch.device("cpu"), quick=True)))
    place = Place(device="cpu")
    verdict = pure(EXPERIMENT, rows, place)
    assert verdict.word == "not measurable here"
    assert "2048 × 2048" in verdict.why
    assert draw(rows, place)
    assert "gpu_ns" not in tabulate(rows, place)[0].columns
