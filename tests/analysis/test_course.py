"""The course's five questions: known answers of real captures, a script's own ranges, and the clock of somebody's CSV."""

from pathlib import Path

import pytest
from tests.public_traces import needs_public, public_trace
from tests.trace.test_graph_capture import replay_of

import own_script as script
from flopwise import units
from flopwise.analysis.course import AGREE, BY_SHAPES, BY_SPEC, HOST, MORE, SHORT, CourseReport, course_trace
from flopwise.analysis.explanation import explain_steps
from flopwise.analysis.traced_model import named_model, traced_model
from flopwise.analysis.traced_steps import traced_steps
from flopwise.api.course import course
from flopwise.errors import FlopwiseError
from flopwise.render.course_answers import answers
from flopwise.trace.read import read_trace
from own_script import own_script

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
NAIVE = "h200-small-fp32-naive-2steps"
KINETO, NSYS = FIXTURES / f"{NAIVE}.kineto.json.gz", FIXTURES / f"{NAIVE}.nsys.sqlite.gz"


@pytest.fixture(scope="module")
def real():
    return course([KINETO, NSYS])


@pytest.fixture
def timed(tmp_path):
    def make(*rows, header="model_size,context,forward_mean_ms"):
        (tmp_path / "timings.csv").write_text("\n".join((header, *rows)))
        return tmp_path / "timings.csv"

    return make


def test_two_profilers_give_the_same_answers(real):
    kineto, nsys = real.traces
    assert kineto.forward_ns == pytest.approx(17.96e6, rel=1e-3)
    assert nsys.forward_ns == pytest.approx(kineto.forward_ns, rel=0.01)
    assert (kineto.top_forward.count, nsys.top_forward.count) == (61, 61)
    assert (kineto.top_backward.count, nsys.top_backward.count) == (48, 48)
    assert kineto.top_forward.name == nsys.top_forward.name != kineto.top_backward.name
    for name in ("matmul_forward", "matmul_step"):
        assert getattr(nsys, name) == pytest.approx(getattr(kineto, name), abs=0.005)
    assert [k.kind for k in kineto.others] == [k.kind for k in nsys.others]
    assert "matmul" not in {k.kind for k in kineto.others}
    assert len(kineto.others) == 5
    for name in ("softmax_ns", "matmul_ns", "projection_ns"):
        assert getattr(nsys.attention, name) == pytest.approx(getattr(kineto.attention, name), rel=0.01)


def test_flops_are_the_shapes_or_the_model_s(real):
    kineto, nsys = (trace.attention for trace in real.traces)
    assert (kineto.flops_by, nsys.flops_by) == (BY_SHAPES, BY_SPEC)
    assert kineto.flops_ratio == pytest.approx(4 * 64 / 5)  # of every context and batch
    assert nsys.flops_ratio == kineto.flops_ratio
    assert nsys.matmul_flops is None  # neither file nor trace tells the context
    told = course(NSYS, context=512, batch=4).traces[0].attention
    for name in ("softmax_flops", "matmul_flops", "projection_flops"):
        assert getattr(told, name) == getattr(kineto, name) > 0
    assert kineto.matmul_flops == 12 * 4 * 4 * 12 * 512**2 * 64
    assert kineto.projection_flops == 12 * 2 * 4 * 512 * 768**2


@pytest.mark.parametrize("ops", [True, False])
def test_a_script_s_own_ranges_are_recognised(tmp_path, ops):
    trace = course(own_script(tmp_path / "small_ctx256.json", ops=ops)).traces[0]
    assert (trace.steps, trace.model.label) == (2, "small, context 256")
    layer = script.QKV + script.SCORES + script.SOFTMAX + script.VALUES + script.PROJECTION + script.MLP + script.GELU
    assert trace.forward_ns == 2e3 * layer
    assert (trace.backward_ns, trace.optimizer_ns) == (2e3 * script.BACKWARD, 1e3 * script.UPDATE)
    assert (trace.attention.softmax_ns, trace.attention.matmul_ns, trace.attention.projection_ns) == (
        2e3 * script.SOFTMAX,
        2e3 * (script.SCORES + script.VALUES),
        2e3 * script.PROJECTION,
    )
    assert (trace.top_forward.name, trace.top_forward.count) == (script.MM, 6)
    assert (trace.top_backward.name, trace.top_backward.count) == (script.MM, 2)
    assert [kernel.gpu_ns for kernel in trace.others] == [2e3 * script.SOFTMAX, 2e3 * script.GELU]
    matmul = 2 * (layer - script.SOFTMAX - script.GELU)
    assert trace.matmul_forward == pytest.approx(matmul / (2 * layer))
    assert trace.matmul_step == pytest.approx(
        (matmul + 2 * script.BACKWARD) / (2 * layer + 2 * script.BACKWARD + script.UPDATE)
    )


def test_warm_up_does_not_count(tmp_path):
    cold, none = (course(own_script(tmp_path / "small.json", warmup=n, steps=3)).traces[0] for n in (5, 0))
    assert (cold.steps, cold.forward_ns) == (none.steps, none.forward_ns) == (3, none.forward_ns)


def test_sizes_of_ops_tell_the_model_and_win_over_its_name(tmp_path):
    model = course(own_script(tmp_path / "trace.json", context=128, layers=12)).traces[0].model
    assert (model.size, model.context, model.batch, model.layers) == ("small", 128, 4, 12)
    wrong = course(own_script(tmp_path / "small_ctx512.json", context=128, layers=12)).traces[0]
    assert wrong.model.context == 128
    assert "context 512, not 128" in wrong.notes[0]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("2.7B_ctx1024.nsys-rep", "2.7B, context 1024"),
        ("large_context-length=256.sqlite", "large, context 256"),
        ("xl-512-train.json.gz", "xl, context 512"),
        ("medium/seq_len128/report1.sqlite", "context 128"),
        ("gpt2-xl_t64.json", "gpt2-xl, context 64"),
        ("2025-07-28_table1.1.2.sqlite", ""),
        ("h200-small-fp32-2steps.json", "small"),
    ],
)
def test_names_tell_size_and_context(name, label):
    assert named_model(name).label == label


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("clock_ms", "verdict"), [(17.0, AGREE), (19.5, AGREE), (22.8, HOST), (10.0, SHORT), (60.0, MORE)]
)
def test_the_csv_s_clock_is_judged(timed, clock_ms, verdict):
    trace = course(KINETO, csv=timed(f"small,512,{clock_ms}", "small,128,3", "large,512,4")).traces[0]
    assert trace.untraced.forward_ns == clock_ms * 1e6
    assert trace.untraced.source == "timings.csv, row 2"
    assert trace.disagreement == verdict
    assert answers(course(KINETO, csv=timed(f"small,512,{clock_ms}")))["a"].count("differs") == (verdict != AGREE)


def test_rows_of_another_model_context_batch_or_precision_are_not_taken(timed):
    header = "size,ctx,batch,precision,forward_ms"
    others = ("small,512,8,fp32,1", "small,512,4,bf16,2", "small,256,4,fp32,3", "medium,512,4,fp32,4")
    none = course(KINETO, csv=timed(*others, header=header)).traces[0]
    assert none.untraced is None
    assert "no row of timings.csv is of small, context 512" in none.notes
    assert (
        course(KINETO, csv=timed(*others, "small,512,4,fp32,20", header=header)).traces[0].untraced.forward_ns == 20e6
    )


def test_a_unit_that_is_not_named_is_the_nearest(timed):
    trace = course(KINETO, csv=timed("small,512,0.02,0.06", header="size,context,forward,forward+backward")).traces[0]
    assert (trace.untraced.forward_ns, trace.untraced.backward_ns) == (20e6, pytest.approx(40e6))
    assert any("read as s" in note for note in trace.notes)


def test_rows_that_do_not_agree_are_named_and_none_is_taken(timed):
    rows = ("small,512,naive,20", "small,512,flash,10")
    trace = course(KINETO, csv=timed(*rows, header="size,context,attention,forward_ms")).traces[0]
    assert trace.untraced is None
    assert "2 rows of timings.csv are of small, context 512 and differ in attention: none is taken" in trace.notes


def test_a_grid_takes_each_trace_s_own_row(tmp_path, timed):
    rows = []
    for size in ("small", "large"):
        for n, context in enumerate((128, 256)):
            own_script(tmp_path / f"{size}_ctx{context}.json", context=context, shapes=False)
            rows.append(f"{size},{context},{0.4 + n}")
    report = course(tmp_path, csv=timed(*rows))
    assert [t.model.label for t in report.traces] == [
        "large, context 128",
        "large, context 256",
        *(f"small, context {n}" for n in (128, 256)),
    ]
    assert [t.untraced.forward_ns for t in report.traces] == pytest.approx([0.4e6, 1.4e6] * 2)
    assert "Of 4 times without a profiler 2 agree; 2 differ otherwise" in answers(report)["a"]
    without = course(tmp_path, csv=timed("small,1", "large,2", header="size,forward_ms"))
    assert all("has no context, and several traces" in t.notes[-1] for t in without.traces)


def test_inference_is_compared_with_training_of_the_same_model(tmp_path):
    own_script(tmp_path / "small_ctx256_train.json", shapes=False)
    own_script(tmp_path / "small_ctx256_inference.json", shapes=False, trains=False)
    report = course(tmp_path)
    inference, train = report.traces
    assert (inference.trains, train.trains) == (False, True)
    assert report.inference(train) == inference
    assert inference.matmul_step is None


def test_nothing_to_read_is_one_line(tmp_path, timed):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FlopwiseError):
        course(tmp_path / "empty", runs=tmp_path)
    with pytest.raises(FlopwiseError, match="columns found: 'a', 'b'"):
        course(KINETO, csv=timed("1,2", header="a,b"))
    with pytest.raises(FlopwiseError, match="no such file"):
        course(KINETO, csv=tmp_path / "none.csv")


def test_a_trace_that_cannot_be_read_is_a_note_among_others_and_an_error_alone(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    report = course([tmp_path / "broken.json", own_script(tmp_path / "small.json")])
    assert len(report.traces) == 1
    assert "broken.json" in report.notes[0]
    with pytest.raises(FlopwiseError, match=r"broken\.json"):
        course(tmp_path / "broken.json")


@pytest.fixture(scope="module")
def replayed():
    """The same work, run by CUDA graphs that were captured before the trace."""
    part = traced_steps(replay_of(read_trace(KINETO)))
    e = explain_steps(part)
    return course_trace(part, e, traced_model(part, KINETO, None)[0])


def test_replays_whose_phase_is_unknown_are_not_answered(replayed, real):
    """A past bug: of a server's trace, 'matmul takes 0 % of the GPU time', by the one per cent that no graph ran."""
    assert replayed.unknown_share > 0.9
    said = answers(CourseReport(traces=(replayed,)))
    assert all("nknown" in answer for answer in said.values())
    whole = units.percent(real.traces[0].matmul_step, 0)
    assert said["d"].startswith(f"Matmul takes {whole} of the whole step's GPU time")


def test_an_unknown_trace_among_others_is_in_no_answer(replayed, real):
    alone, both = (answers(CourseReport(traces=some)) for some in (real.traces, (*real.traces, replayed)))
    assert both["a"] == alone["a"] + " 1 of 3 traces are in no answer: CUDA graphs hide what is forward."
    assert {key: both[key] for key in "bcde"} == {key: alone[key] for key in "bcde"}


@needs_public
def test_a_capture_beside_a_servers_trace_answers():
    (trace,) = course(public_trace("tl_sglang_decode_sglang")).traces
    assert trace.unknown_share < 0.01
    assert trace.matmul_forward == pytest.approx(0.59, abs=0.01)
    assert trace.forward_span_ns < 10.5e6  # not the 474 ms in which the GPU ran what the file does not hold


def test_a_folder_without_traces_says_what_is_missing(tmp_path):
    with pytest.raises(FlopwiseError, match="is a folder without a trace") as refused:
        course(tmp_path)
    assert ".json.gz" in refused.value.hint
