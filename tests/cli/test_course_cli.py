"""`flopwise course`: one screen, a report, JSON; whatever the CSV holds, one line."""

import json
from pathlib import Path

import pytest

from own_script import own_script

FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
TRACES = sorted(FIXTURES.iterdir())
SWEEP = """
name = "grid"
[base]
workload = "tiny"
device = "cpu"
trace = "kineto"
samples = 1
warmup = 0
batch = 1
context = 8
[group.a]
phase = ["forward", "train"]
optimizer = "adamw-loop"
"""


@pytest.fixture
def timings(tmp_path):
    path = tmp_path / "timings.csv"
    path.write_text(",model_size,context_length,forward_mean_ms\n0,small,512,22.8\n")
    return path


@pytest.mark.parametrize("traces", [TRACES[-1:], TRACES])
def test_the_answer_is_one_screen(traces, timings, cli):
    done = cli("course", *traces, "--csv", timings)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert [line[:3] for line in lines if line.startswith("(")] == ["(a)", "(b)", "(c)", "(d)", "(e)"]


def test_a_report_has_a_table_and_an_answer_for_each_question(timings, tmp_path, cli):
    report = tmp_path / "report.md"
    assert cli("course", *TRACES, "--csv", timings, "-o", report).returncode == 0
    text = report.read_text()
    for letter in "abcde":
        table = text.split(f"**({letter}) ")[1]
        assert table.split("\n\n")[1].startswith("| trace |")
        assert table.split("\n\n")[2].startswith("- ")
    assert "22.80" in text
    assert "timings.csv, row 2" in text


def test_json_has_the_answers_and_the_numbers(timings, cli):
    found = json.loads(cli("course", TRACES[-1], "--csv", timings, "--format", "json").stdout)
    assert found["schema"] == "flopwise.course/1"
    assert list(found["answers"]) == list("abcde")
    (trace,) = found["traces"]
    assert trace["untraced"]["forward_ns"] == 22.8e6
    assert trace["attention"]["flops_ratio"] == pytest.approx(51.2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n", "no column has the model's size; columns found: 'a', 'b'"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is no text in UTF-8"),
        (b'size,forward_ms\n"small,3\n', "is no CSV"),
        (b"size,forward_ms\nsmall,=cmd()\n", "no row has a time"),
        (b"", "holds no table"),
    ],
)
def test_a_csv_that_is_none_is_one_line(content, said, tmp_path, cli):
    (tmp_path / "t.csv").write_bytes(content)
    done = cli("course", TRACES[-1], "--csv", tmp_path / "t.csv")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert said in error
    assert hint.startswith("hint: ")


def test_the_csv_is_not_written_over(timings, cli):
    before = timings.read_text()
    assert cli("course", TRACES[-1], "--csv", timings, "-o", timings).returncode == 2
    assert timings.read_text() == before


def test_twenty_traces_of_somebody_s_script(tmp_path, cli):
    rows = ["size,ctx,forward_ms"]
    for size in ("small", "medium", "large", "xl", "2.7B"):
        for context in (128, 256, 512, 1024):
            own_script(tmp_path / f"{size}_ctx{context}.json", context=context, shapes=False)
            rows.append(f"{size},{context},0.4")
    (tmp_path / "timings.csv").write_text("\n".join(rows))
    found = json.loads(cli("course", tmp_path, "--csv", tmp_path / "timings.csv", "--format", "json").stdout)
    assert len(found["traces"]) == 20
    assert "Of 20 times without a profiler 20 agree" in found["answers"]["a"]
    assert {t["disagreement"] for t in found["traces"]} == {"agree"}


def test_a_sweep_captures_a_trace_of_every_point(tmp_path, cli):
    (tmp_path / "grid.toml").write_text(SWEEP)
    done = cli("sweep", tmp_path / "grid.toml", "--runs", tmp_path / "runs", "-q", "--format", "json")
    points = json.loads(done.stdout)["points"]
    traces = [next((tmp_path / "runs").glob(f"*/traces/{point['trace_file']}")) for point in points]
    assert len(set(traces)) == 2
    many = cli("explain", "last", "--runs", tmp_path / "runs")
    assert (many.returncode, "has 2 traces" in many.stderr) == (2, True)
    assert cli("explain", traces[1]).returncode == 0
    cpu = cli("course", "last", "--runs", tmp_path / "runs")
    assert (cpu.returncode, "no GPU work" in cpu.stderr) == (2, True)
