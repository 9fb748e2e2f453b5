"""What is shown of a measured step: what ran, MFU and tokens per second."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.records.run import STEP, Environment, Gpu, PhaseTimes, Point, Ran, Seen
from flopwise.render.run_screen import point_screen
from flopwise.render.run_view import point_table, sweep_table
from flopwise.render.table import csv_text, markdown
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import Sampling, Trial, workload

H200 = Gpu(name="NVIDIA H200", memory_bytes=1, sm_count=132, l2_bytes=1, capability="9.0")
SEEN = Seen(
    flops={"bf16": 9 * 10**13, "fp32": 10**13},
    useful_flops=8 * 10**13,
    tokens=12_288,
    autocast="bf16",
    backwards=4,
    updates=1,
    clips=True,
)


def point(target="py:my.steps:make", seen=SEEN, on=H200, **levers):
    trial = Trial(workload=workload(target, **levers), sampling=Sampling())
    where = "cuda:0" if on is not None else "cpu"
    ran = Ran(
        device=where, weights="fp32", fp32_matmul="ieee", attention="written out", optimizer="AdamW foreach", seen=seen
    )
    environment = Environment(flopwise="1", python="3", torch="2", gpu=on)
    times = PhaseTimes(phase=STEP, wall_ns=(10**9,) * 8)
    return Point(key=trial.key(), trial=trial, status="ok", phases=(times,), ran=ran, environment=environment)


def notes(one):
    return point_table(one).notes


def test_what_ran_is_said_in_one_line():
    (said,) = (note for note in notes(point()) if note.startswith("what ran"))
    assert said == (
        "what ran: weights fp32; matmuls 90 % bf16, 10 % fp32 (autocast); attention written out; AdamW foreach; "
        "gradients of 4 backward passes summed; gradients clipped; 80.0 TFLOP and 12,288 tokens a step"
    )
    (unseen,) = (note for note in notes(point(seen=None)) if note.startswith("what ran"))
    assert "fp32 matmuls: ieee" in unseen


def test_mfu_is_of_the_peak_of_the_dtype_that_most_flops_are_done_in():
    share = 8e13 / gpu("h200").peak("bf16")
    assert f"MFU {100 * share:.1f} % of 989 TFLOP/s bf16; 12.3K tokens/s" in notes(point())
    (row,) = sweep_table([point()], "x").rows
    assert (row["mfu"], row["tokens_per_s"]) == (pytest.approx(share), 12_288)
    assert "MFU" in markdown(sweep_table([point(), point()], "x"))
    assert ",mfu,tokens_per_s," in csv_text(point_table(point()))


def test_without_a_known_gpu_there_is_no_mfu_but_tokens():
    other = msgspec.structs.replace(H200, name="Voodoo 2")
    for on in (None, other):
        assert "12.3K tokens/s" in notes(point(on=on))
        assert not any("MFU" in note for note in notes(point(on=on)))


def test_a_preset_has_its_formula_and_the_precision_of_its_recipe():
    exact, pure, master = (
        point("small", seen=None, precision=precision, **({"optimizer": "flopwise"} if "master" in precision else {}))
        for precision in ("fp32", "bf16-pure", "bf16-master")
    )
    shares = [sweep_table([one], "x").rows[0]["mfu"] for one in (exact, pure, master)]
    assert shares[0] / shares[1] == pytest.approx(gpu("h200").peak("bf16") / gpu("h200").peak("fp32"))
    assert shares[1] == shares[2]


def test_a_step_that_could_not_be_watched_says_so():
    failed = point(seen=Seen(problem="OutOfMemoryError: no"))
    assert any("fails when run op by op (OutOfMemoryError: no)" in note for note in notes(failed))


def test_the_columns_of_rates_are_in_files_alone():
    table = point_table(point())
    assert "tokens/s" not in markdown(replace(table, notes=()))


@given(st.lists(st.tuples(*[st.integers(1, 10**9)] * 3, st.floats(0.5, 1.5)), min_size=1, max_size=30))
def test_the_bar_adds_up_to_the_step(samples):
    """The law: whatever the samples, and however much longer phases take when timed one by one, the parts are the step."""
    names = ("forward", "backward", "optimizer")
    walls = tuple(round(sum(phases) * longer) + 1 for *phases, longer in samples)
    phases = [PhaseTimes(phase=name, wall_ns=tuple(one[i] for one in samples)) for i, name in enumerate(names)]
    step = PhaseTimes(phase=STEP, wall_ns=walls)
    screen = point_screen(msgspec.structs.replace(point(on=None, seen=None), phases=(step, *phases)))
    assert min(part.amount for part in screen.parts) >= 0
    assert sum(part.amount for part in screen.parts) == pytest.approx(screen.figures[0].amount)
