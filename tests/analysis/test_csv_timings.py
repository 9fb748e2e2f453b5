"""Anybody's table of timings is read, or refused in one line that names its columns."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.analysis.csv_timings import BACKWARD, BOTH, FORWARD, LARGEST, MOST_ROWS, STEP, read_timings
from flopwise.errors import FlopwiseError

PANDAS = ",model_size,context_length,forward_mean_ms,forward_std_ms,backward_mean_ms,step_mean_ms\n0,small,128,51.1,1.2,70,130\n"
LONG = """| model_size   | precision   | pass_type        |   avg_time_ms |
|:-------------|:------------|:-----------------|--------------:|
| small        | fp32        | forward+backward |       121.235 |
| small        | fp32        | forward          |        40.000 |
"""
OURS = """workload,phase,context,wall_ns,wall_half_width,gpu_ns,launch_ns,bound,forward_wall_ns,backward_wall_ns,optimizer_wall_ns
small,forward,512,23000000.0,0.1,19000000,22000000,launch,,,
small,backward,512,59000000.0,0.1,57000000,40000000,gpu,20000000,39000000,
small,train,512,64000000.0,0.1,65000000,61000000,mixed,21000000.0,38000000.0,11000000.0
"""


@pytest.fixture
def read(tmp_path):
    def write_and_read(text):
        (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_timings(tmp_path / "t.csv")

    return write_and_read


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (PANDAS, {FORWARD: (51.1, "ms"), BACKWARD: (70.0, "ms"), STEP: (130.0, "ms")}),
        (
            "\ufeffModel Size,Seq Len,Forward Time (s),Backward Time (s)\nsmall,128,0.05,0.1\n",
            {FORWARD: (0.05, "s"), BACKWARD: (0.1, "s")},
        ),
        ("size;ctx;fwd [ms];bwd [ms]\nsmall;128;12,5;25,0\n", {FORWARD: (12.5, "ms"), BACKWARD: (25.0, "ms")}),
        ("model\tseqlen\tforward_std\tforward_median\tforward_mean\nsmall\t128\t1\t2\t3\n", {FORWARD: (3.0, "")}),
        ("file,duration_ms,python_ms,speedup\nsmall_ctx128,26.7,51.1,1.9\n", {FORWARD: (51.1, "ms")}),
        (
            "model_size,eager_forward_ms,compiled_forward_ms,eager_full_step_ms,compiled_full_step_ms\nsmall,31.5,19.9,120.3,73.6\n",
            {FORWARD: (31.5, "ms"), STEP: (120.3, "ms")},
        ),
        (
            'size,forward_ms,forward+backward_ms\nsmall,30 ± 2,"1,090.5"\n',
            {FORWARD: (30.0, "ms"), BOTH: (1090.5, "ms")},
        ),
        ("size,forward_us\nsmall,OOM\nsmall,=HYPERLINK(1)\nsmall,7\n", {FORWARD: (7.0, "us")}),
    ],
)
def test_headings_of_many_kinds_are_understood(read, text, times):
    rows = [row for row in read(text).rows if row.times]
    assert [row.times for row in rows] == [times]
    assert rows[0].size.startswith("small")


def test_a_long_table_says_in_each_row_what_it_is_of(read):
    both, forward = read(LONG).rows
    assert (both.times, both.trains) == ({BOTH: (121.235, "ms")}, True)
    assert (forward.times, forward.trains, forward.precision) == ({FORWARD: (40.0, "ms")}, False, "fp32")


def test_flopwise_s_own_table_is_one(read):
    inference, gradients, train = read(OURS).rows
    assert (inference.times, inference.trains, inference.context) == ({FORWARD: (23e6, "ns")}, False, 512)
    assert gradients.times == {BOTH: (59e6, "ns"), FORWARD: (20e6, "ns"), BACKWARD: (39e6, "ns")}
    assert train.times == {STEP: (64e6, "ns"), FORWARD: (21e6, "ns"), BACKWARD: (38e6, "ns")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", r"no column has the model's size; columns found: 'a', 'b'"),
        ("size,color\nsmall,red\n", r"no column has the time of a pass; columns found: 'size', 'color'"),
        ("size,forward_ms\nsmall,OOM\n", "no row has a time"),
        ("", "holds no table"),
        ("# only a title\n", "holds no table"),
        ('size,forward_ms\n"small,3\n', "no CSV: unexpected end of data"),
        ('size,forward_ms\n"' + "s" * 200_000 + '",3\n', "no CSV: field larger"),
        (b"\x00\x01\x02\xff", "no text in UTF-8"),
        ("size,forward_ms\nsmall,3\n".encode("utf-16"), "no text in UTF-8"),
        ("," * 5000 + "\n", "5,001 columns"),
        ("s\n" * (MOST_ROWS + 2), "100,001 rows"),
        ("size,forward\x1b[31m\nsmall,x\n", r"'forward \[31m'"),
    ],
)
def test_what_is_no_table_of_timings_is_refused_in_one_line(read, text, said):
    with pytest.raises(FlopwiseError, match=said) as raised:
        read(text)
    assert len(raised.value.message) <= 400
    assert raised.value.message.isprintable()
    assert raised.value.hint


@pytest.mark.parametrize("context", ["abc", "0", "-512", "9" * 30])
def test_a_row_of_no_possible_context_is_not_taken(read, context):
    text = f"model,context,forward_ms\nsmall,{context},20\nsmall,512,21\n"
    assert [row.context for row in read(text).rows] == [512]


def test_a_gigabyte_is_refused_unread(tmp_path):
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(2**30)  # sparse: it takes no room
    with pytest.raises(FlopwiseError, match=r"1\.00 GiB: no table of timings has over 4\.00 MiB"):
        read_timings(path)
    assert LARGEST < 2**30


@given(st.binary(max_size=300) | st.text(alphabet='sizeforwadm,;|"\n\t_#=1234.:-', max_size=300))
def test_any_bytes_are_a_table_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with contextlib.suppress(FlopwiseError):
        for row in read_timings(path).rows:
            assert all(0 < value < 1e15 and phase for phase, (value, _) in row.times.items())
