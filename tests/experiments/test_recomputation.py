"""recomputation: the best N follows from the sizes, the verdict from memory and time; the fused kernels compile."""

import pytest
from made_rows import measured
from made_rows import timed as exact

from flopwise.experiments.claims.recomputation import ACCESSES, EXPERIMENT, FUSED_AGAIN, FUSED_KEPT, checkpointing
from flopwise.kernels.pointwise_chains import cases
from flopwise.predict.dry.run import dry_run
from flopwise.records.experiment import Place
from flopwise.spec.workload import workload

CPU, GPU = Place(device="cpu"), Place(device="cuda:0")
LAYERS = 16


def timed(wall_ns, gpu=True, launches=1.0):
    """Where `launches` set the pace, the wall clock shows them and the GPU's holds waits for them."""
    clocks = {"gpu_ns": wall_ns if gpu else None, "gpu_exact": gpu and launches == 1}
    return exact(wall_ns * launches, gpu, samples=6, **clocks)


def made(block=4, extra=0.3, fused=0.6, gpu=True, launches=1.0, graph=False, off=0.0):
    """16 blocks, each keeping so many times its input of 1 MiB; to compute again costs `extra`, fused it takes `fused`.

    The wall clock of a step shows `launches` times the device's time; `graph`: timed as one, too.
    """
    rows = [
        {"part": "sigmoids", "way": way, "n": 8, "accesses": ACCESSES[way], "moved_bytes": 32 * ACCESSES[way]}
        | {"off": off, "peak_bytes": 64 if gpu else None}
        | timed(1000.0 * (fused if way == FUSED_AGAIN else 1), gpu)
        for way in ACCESSES
        if gpu or "fused" not in way
    ]
    for every in (0, 1, 2, 4, 8, 16):
        kept = (-(-LAYERS // every) if every else LAYERS * block) * 2**20
        peak = kept + every * block * 2**20
        step = 1e6 * (1 + (extra if every else 0))
        captured = {"graph_ns": step, "graph_low_ns": step, "graph_high_ns": step} if graph else {}
        about = {"part": "blocks", "every": every, "layers": LAYERS, "segments": -(-LAYERS // every) if every else 0}
        about |= {"input_bytes": 2**20, "workload": "made", "kept_bytes": kept, "peak_bytes": peak}
        about |= {"memory_from": "the allocator" if gpu else "the profiler"}
        rows.append({**about, **captured, **timed(step, gpu, launches)})
    return rows


@pytest.mark.parametrize(("block", "best"), [(1, 4), (4, 2), (16, 1), (30, 1)])
def test_the_best_segment_is_where_its_blocks_weigh_as_much_as_the_kept_inputs(block, best):
    found = checkpointing(EXPERIMENT.read(made(block)))
    assert found.best.every == best
    assert found.inputs_per_block == pytest.approx(block)
    assert found.predicted == pytest.approx(max(1.0, (LAYERS / block) ** 0.5))


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "1.67 times as fast where the bytes say 1.60" in yes.why
    assert pure(EXPERIMENT, made(extra=0.8), GPU).word == "refuted here"  # too slow
    assert pure(EXPERIMENT, made(block=1), GPU).word == "refuted here"  # nothing to save: 16 MiB kept, 8 at best
    assert pure(EXPERIMENT, made(fused=1.2), GPU).word == "refuted here"
    here = pure(EXPERIMENT, made(gpu=False), CPU)
    assert here.word == "inconclusive"
    assert "need a GPU" in here.why
    sigmoids = [row for row in made() if row["part"] == "sigmoids"]
    assert pure(EXPERIMENT, sigmoids, GPU).word == "inconclusive"


def test_where_launches_set_the_pace_the_graph_decides(pure):
    yes = pure(EXPERIMENT, made(launches=2.0, graph=True), GPU)
    assert yes.word == "confirmed"
    assert "the GPU's time by +30 %" in yes.why
    assert (
        "launches set the pace: 2.00 ms became 2.60 ms on the wall clock, and 1.00 ms became 1.30 ms on the GPU"
        in yes.why
    )
    assert pure(EXPERIMENT, made(extra=0.8, launches=2.0, graph=True), GPU).word == "refuted here"
    left = pure(EXPERIMENT, made(launches=2.0), GPU)  # no graph: the GPU's clock holds waits
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: all kept takes 1.00 ms at most" in left.why
    assert "launches set the pace" not in pure(EXPERIMENT, made(graph=True), GPU).why


def test_wrong_gradients_and_a_part_of_the_evidence_decide_nothing(pure):
    wrong = pure(EXPERIMENT, made(off=1e9), GPU)
    assert wrong.word == "inconclusive"
    assert "wrong gradients" in wrong.why
    assert pure(EXPERIMENT, made()[:-1], GPU).word == "inconclusive"  # without the segment of all
    assert pure(EXPERIMENT, [row for row in made() if row.get("way") != FUSED_AGAIN], GPU).word == "inconclusive"


def test_unsteady_times_decide_nothing(pure):
    steady = made(gpu=False, extra=0.8)
    assert pure(EXPERIMENT, steady, CPU).word == "refuted here"
    rows = [{**row, "wall_low_ns": 0.5 * row["wall_ns"], "wall_high_ns": 2 * row["wall_ns"]} for row in steady]
    left = pure(EXPERIMENT, rows, CPU)
    assert left.word == "inconclusive"
    assert "Too uncertain to tell: all kept takes 1.00 ms, between 500 µs and 2.00 ms in 6 samples" in left.why


def test_the_lectures_count():
    assert (ACCESSES[FUSED_KEPT], ACCESSES[FUSED_AGAIN]) == (8, 5)


def test_the_fused_kernels_compile_for_a_gpu():
    resources = pytest.importorskip("flopwise.kernels.resources")
    for case in cases():
        if "sin_cos" not in case.name:  # a sine of large numbers needs a stack, whoever compiles it
            assert resources.resources(case, 90).spilled_bytes == 0


@pytest.mark.slow
def test_a_quick_run_on_the_cpu(pure):
    rows = measured(EXPERIMENT)
    assert all(row["off"] == 0 for row in rows if row["part"] == "sigmoids")
    none, one, _ = (row for row in rows if row["part"] == "blocks")
    assert one["kept_bytes"] < none["kept_bytes"]
    dry = dry_run(workload("tiny", set={"n_layers": 3}, batch=2, phase="backward", checkpoint=1), "cpu")
    before = dry.moments[0].total_bytes - dry.gradients_bytes
    assert one["peak_bytes"] == pytest.approx(dry.peak_bytes - before, rel=0.001)  # measured as predicted
    assert pure(EXPERIMENT, rows, CPU).why
    typed = EXPERIMENT.read(rows)
    assert len(EXPERIMENT.draw(typed, CPU)) == 3
    assert "gpu_ns" not in EXPERIMENT.tabulate(typed, CPU)[0].keys
