"""One screen: at most 25 lines of 80 columns whatever is in it, the same text with and without colour, no number invented."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from flopwise import units
from flopwise.advice.findings import changes, worth_most
from flopwise.analysis.reach import limit, reach
from flopwise.api.account import account
from flopwise.api.explain import explain
from flopwise.records.untraced import UntracedStep
from flopwise.records.waterfall import ATTENTION_PART, BELOW_BANDWIDTH, IDEAL, MATMUL_OTHER, Waterfall, WaterfallPart
from flopwise.render.account_screen import account_screen
from flopwise.render.explain_screen import explanation_screen, waterfall_parts
from flopwise.render.memory_screen import memory_screen
from flopwise.render.names import stored_in
from flopwise.render.one_screen import text
from flopwise.render.run_screen import VERSUS, point_screen, run_screen
from flopwise.render.screen import (
    BEFORE,
    IDLE,
    LIMIT,
    LINES,
    MEASURED,
    MOST_PARTS,
    NOW,
    OTHER,
    PREDICTED,
    REACHABLE,
    SPECIFIED,
    TUNED,
    USEFUL,
    WIDTH,
    Change,
    Figure,
    Part,
    Screen,
    reach_figures,
)
from flopwise.render.tune_screen import tune_screen
from flopwise.snapshot.stored import stored_report
from flopwise.spec.gpu import gpu
from flopwise.spec.model import preset_names
from flopwise.store import StoredRun
from flopwise.store.tuning import read_tuning

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "tests" / "trace" / "fixtures").glob("*.gz"))
RESULTS = ROOT / "benchmarks" / "results"
RUNS = sorted(path.parent for path in RESULTS.glob("h200-2026-11*/*/run.json"))
TUNINGS = sorted(path.parent for path in RESULTS.glob("h200-2026-11*/*/tuning.jsonl"))
ANSI = re.compile(r"\x1b\[[0-9;]*m")
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
OBTAINED = {MEASURED, PREDICTED, SPECIFIED}


def coloured(screen, **options):
    return text(screen, Console(file=io.StringIO(), force_terminal=True, color_system="standard", **options))


def assert_fits(screen):
    plain = text(screen)
    lines = plain.splitlines()
    assert len(lines) <= LINES
    assert max(map(cell_len, lines)) <= WIDTH
    assert not STEERING.search(plain)
    assert all(line == line.rstrip() for line in lines)
    assert ANSI.sub("", coloured(screen)) == plain
    return plain


def amount(screen, name):
    return next((one.amount for one in screen.figures if one.name == name), None)


def assert_sound(screen):
    """The laws of every real screen."""
    plain = assert_fits(screen)
    assert {one.how for one in screen.figures} <= OBTAINED
    assert [one.name for one in screen.figures] == sorted(
        (one.name for one in screen.figures), key=[NOW, BEFORE, VERSUS, REACHABLE, TUNED, LIMIT].index
    )
    names = (BEFORE, TUNED, LIMIT) if amount(screen, BEFORE) else (NOW, REACHABLE, LIMIT)
    now, reachable, limit = (amount(screen, name) for name in names)
    if screen.unit == "ns":
        known = [one for one in (limit, reachable, now) if one is not None]
        assert known == sorted(known)
    assert all(one.saving > 0 and one.what and one.line for one in screen.changes)
    assert all(share is None or 0 < share <= 1.0001 for share in (one.mfu for one in screen.figures))
    assert "nan" not in plain
    assert "None" not in plain
    return plain


@pytest.fixture(scope="module", params=TRACES, ids=lambda path: path.name)
def explained(request):
    return explain(request.param)


def test_a_trace(explained):
    screen = explanation_screen(explained)
    plain = assert_sound(screen)
    assert amount(screen, NOW) == explained.step_ns
    assert "traced" in plain  # these have no untraced clock, and say so
    saved = sum(one.counted_ns for one in changes(explained.findings))
    assert amount(screen, REACHABLE) == explained.reach.reachable_ns
    assert amount(screen, REACHABLE) == pytest.approx(max(explained.step_ns - saved, amount(screen, LIMIT) or 0))
    assert sum(part.amount for part in screen.parts) == pytest.approx(explained.step_ns)


def test_the_untraced_step_is_now_where_it_was_measured(explained):
    ns = explained.busy_ns * 1.1
    step = UntracedStep(ns=ns, low_ns=ns, high_ns=ns, measured=True)
    clocked = msgspec.structs.replace(explained, waterfall=None, untraced_step=step)
    screen = explanation_screen(clocked)
    assert amount(screen, NOW) == explained.busy_ns * 1.1
    assert "without a profiler" in assert_fits(screen)


def test_the_changes_shown_save_most_and_none_changes_the_work(explained):
    found = explained.findings
    best = worth_most(found)
    others = [one.counted_ns for one in found if one not in best]
    assert min(one.counted_ns for one in best if not one.enables) >= max(others, default=0)
    batch = msgspec.structs.replace(found[0], rule="small_batch", counted_ns=1e12)
    assert worth_most((batch, *found)) == best


def test_without_a_known_gpu_there_is_no_limit_and_still_a_bar(explained):
    reached = reach(explained.step_ns, [1e6])
    screen = explanation_screen(msgspec.structs.replace(explained, waterfall=None, gpu="Voodoo 2", reach=reached))
    assert_fits(screen)
    assert amount(screen, LIMIT) is None
    assert all(one.mfu is None for one in screen.figures)
    assert sum(part.amount for part in screen.parts) == pytest.approx(explained.step_ns, rel=0.01)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("folder", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_stored_run(folder):
    run = StoredRun.load(folder)
    timed = [point for point in run.points if point.phases] or run.points
    if timed and not timed[0].memory_file:  # one of each: predicting what a lever saves takes a moment
        assert_sound(point_screen(timed[0], f"Stored in {run.path}"))
    whole = run_screen(run)
    assert (whole is None) == (len(run.points) != 1 and not (len(run.points) == 2 and run.points[1].paired_with))
    if whole is not None:
        assert_sound(whole)
    if any(point.memory_file and (folder / "memory" / point.memory_file).is_file() for point in run.points):
        assert_sound(memory_screen(stored_report(run)))


@pytest.mark.parametrize("folder", TUNINGS, ids=lambda path: path.name)
def test_a_tuning(folder):
    tuning = read_tuning(folder)
    screen = tune_screen(tuning)
    plain = assert_sound(screen)
    assert (amount(screen, BEFORE), amount(screen, TUNED)) == (tuning.first_ns, tuning.last_ns)
    assert {one.how for one in screen.figures} == {MEASURED, SPECIFIED}
    assert "The recipe: --" in plain
    cut = msgspec.structs.replace(tuning, attempts=(), ended=None)
    assert amount(tune_screen(cut), TUNED) is None
    assert "The recipe" not in assert_sound(tune_screen(cut))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", preset_names())
def test_a_preset_without_a_gpu_has_its_memory(name):
    screen = account_screen(account(name))
    assert_sound(screen)
    assert screen.unit == "bytes"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["tiny", "small", "llama3.2-1b", "10B"])
def test_a_preset_on_a_gpu_has_its_time_if_it_fits(name):
    found = account(name, gpu="h200,h100")
    screen = account_screen(found)
    plain = assert_sound(screen)
    assert screen.unit == ("ns" if found.gpus[0].fits else "bytes")
    assert "H100 SXM 80 GB" in plain
    assert {one.how for one in screen.figures} == {PREDICTED, SPECIFIED}


def test_a_measured_step_of_an_account_is_now():
    screen = account_screen(account("tiny", gpu="h200", measured_ns=10**8))
    assert_sound(screen)
    assert (screen.figures[0].amount, screen.figures[0].how) == (10**8, MEASURED)


FULL = Screen(
    title="title",
    verdict="verdict " * 60,
    figures=tuple(Figure(name, 1e6, MEASURED, 0.5, "note " * 30) for name in (NOW, REACHABLE, LIMIT)),
    parts_title="parts",
    parts=tuple(Part(f"part {i}", float(i), kind) for i, kind in enumerate((USEFUL, IDLE, OTHER) * 7)),
    changes_title="changes",
    changes=tuple(Change("what " * 30, 1e6, "line " * 30) for _ in range(5)),
    notes=tuple("note " * 20 for _ in range(9)),
)
EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b[31m\x9b31m\u202e\u2028\x7f\r\nfake row|<b>[red]"
NAMES = {"long": "A" * 10_000, "evil": EVIL * 500, "wide": "漢字" * 5_000, "marks": "e" + "\u0301" * 9_999, "": ""}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_no_name_can_break_it(name):
    screen = Screen(
        title=name,
        verdict=name,
        figures=tuple(Figure(one, 1e6, MEASURED, 0.5, name) for one in (NOW, REACHABLE, LIMIT)),
        parts_title=name,
        parts=tuple(Part(name, 1.0) for _ in range(20)),
        changes_title=name,
        changes=tuple(Change(name, 1e6, name) for _ in range(4)),
        notes=(name,) * 4,
    )
    plain = assert_fits(screen)
    assert not any(line.startswith("fake row") for line in plain.splitlines())
    assert max(map(len, plain.splitlines())) <= 6 * WIDTH  # marks have no width of their own


def test_a_full_screen_is_full():
    lines = assert_fits(FULL).splitlines()
    assert len(lines) == LINES
    assert lines[-1] == "All tables: --full"


def test_no_color_leaves_the_same_text_without_colour():
    shown = coloured(FULL, no_color=True)
    assert ANSI.sub("", shown) == text(FULL)
    codes = {code for found in ANSI.findall(shown) for code in found[2:-1].split(";")}
    assert codes <= {"0", "1", "2"}  # bold and dim stay
    assert "32" in {code for found in ANSI.findall(coloured(FULL)) for code in found[2:-1].split(";")}


amounts = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e12)


@given(st.lists(amounts, max_size=20), st.lists(amounts, max_size=4), st.sampled_from(["ns", "bytes"]))
@example([2.2e16, 0.0, 0.0, -1.2e16], [], "ns")
@example([8.988465674311579e307, 8.98846567431158e307], [], "ns")
@example([2.365385703766205e306], [], "ns")
@settings(max_examples=200, deadline=None)
def test_any_numbers_fit(sizes, savings, unit):
    parts = tuple(Part("part", size, kind) for size, kind in zip(sizes, (USEFUL, IDLE, OTHER) * 7, strict=False))
    figures = tuple(Figure(NOW, saving, MEASURED, saving) for saving in savings)
    changes = tuple(Change("what", saving, "line") for saving in savings)
    assert_fits(Screen(title="t", unit=unit, figures=figures, parts_title="p", parts=parts, changes=changes))


@given(st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_the_bar_is_whole_and_its_marks_differ(sizes):
    plain = text(Screen(title="t", parts_title="p", parts=tuple(Part(f"{size}", size) for size in sizes)))
    bar, *legend = plain.splitlines()[3:-2]
    assert len(bar) == WIDTH - 2
    marks = list(dict.fromkeys(bar.strip()))
    assert len(marks) == min(len(marks), MOST_PARTS)
    shown = "\n".join(legend)
    assert all(f"{mark} " in shown for mark in marks)


def test_where_a_run_lies_is_one_line_whatever_its_path():
    """A past bug: a path beyond 80 columns was broken in the middle of a word."""
    for depth in range(20):
        line = stored_in(Path("/mnt", *["some-scratch-folder"] * depth, "runs", "20261117-234638-memory-tiny-24ac"))
        (shown,) = [one for one in text(Screen(title="t", notes=(line,))).splitlines() if one.startswith("Stored in ")]
        assert shown == line
        assert shown.endswith("/runs/20261117-234638-memory-tiny-24ac")
        assert ("…" in shown) == (depth > 1)


def fallen(*parts, **fields):
    whole = sum(ns for _, ns, _ in parts)
    made = tuple(
        WaterfallPart(name=name, ns=ns, share=ns / whole, how=MEASURED, by_class=kinds) for name, ns, kinds in parts
    )
    rest = {"measured_by": "the trace", "mfu": 0.5, "hfu": 0.5, "roofline_share": None, "precision": "bf16"}
    return Waterfall(step_ns=whole, parts=made, **rest, **fields)


def test_the_ideal_says_its_rate_where_it_is_not_that_of_the_limit(explained):
    """A past bug: 'useful FLOPs 7.59 ms' under a limit of 6.07 ms, the one at 80 % of the datasheet's peak."""
    found = explained.waterfall
    if found.mfu is not None:
        share, machine = units.percent(found.peak_share, 0), gpu(explained.gpu)
        assert waterfall_parts(found)[0].name == f"{found.precision} FLOPs, {share} peak"
        flops = found.ns(IDEAL) * found.peak_share * machine.peak(found.precision)
        assert flops == pytest.approx(explained.reach.limit_ns * machine.peak(explained.reach.dtype), rel=0.01)


def test_matmuls_that_beat_the_ideal_show_their_own_rate_and_nothing_below_zero():
    beaten = fallen((IDEAL, 10.0, {}), (MATMUL_OTHER, -1.0, {}), (ATTENTION_PART, 3.0, {}), peak_share=0.8)
    assert waterfall_parts(beaten) == (Part("bf16 FLOPs, 89 % peak", 9.0, USEFUL), Part("attention", 3.0, OTHER))
    impossible = fallen((IDEAL, 10.0, {}), (MATMUL_OTHER, -5.0, {}), peak_share=0.8)
    assert waterfall_parts(impossible)[0].name == "bf16 FLOPs above peak"


def test_kernels_of_unknown_kind_are_not_called_memory_bound():
    found = waterfall_parts(fallen((BELOW_BANDWIDTH, 10.0, {"other": 7.0, "elementwise": 3.0})))
    assert {one.name: one.amount for one in found} == {"memory-bound ops": 3.0, "unknown kernels": 7.0}
    nothing = waterfall_parts(fallen((BELOW_BANDWIDTH, 10.0, {"other": 10.0})))
    assert [one.name for one in nothing if one.amount] == ["unknown kernels"]


def test_the_bytes_of_a_traced_server_are_not_said_to_be_bf16():
    """Its kernels may read fp8; those of a workload that nobody ran are counted in bf16."""
    fall = fallen((IDEAL, 1e6, {}), (MATMUL_OTHER, 9e6, {}), peak_share=0.8)
    traced, said = reach(1e7, [], fall, "h100", 100e9), limit(1e6, "bf16", "h100", 10e9)
    assert [one.note for found in (traced, said) for one in reach_figures(found)] == [
        "its bytes at 3.35 TB/s",
        "its bytes in bf16 at 3.35 TB/s",
    ]


def test_parts_of_one_name_are_added_up(explained):
    parts = waterfall_parts(explained.waterfall)
    assert len({part.name for part in parts}) == len(parts)
    assert sum(part.amount for part in parts) == pytest.approx(sum(one.ns for one in explained.waterfall.parts))


def test_remarks_are_sentences(explained):
    notes = explanation_screen(explained).notes
    assert all(note[:1] == note[:1].upper() and note.endswith(".") for note in notes)
