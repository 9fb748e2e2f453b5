"""`flopwise explain` and `report` of the traces of a job's ranks, as typed."""

import gzip
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.rank_traces import Job, write

import flopwise
from flopwise.records.ranks import RanksExplanation

COMPILED = Path(__file__).parents[1] / "trace" / "fixtures" / "h200-small-bf16-compiled-2steps.kineto.json.gz"
EVIL = '\x1b[31m</script><img src=x onerror=alert(1)>\u202e"|`\n'


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write(Job(case="host", ranks=8), folder)
    return folder


def test_a_folder_and_its_files_give_one_screen(run, traces):
    code, out, err = run("explain", traces)
    assert (code, err) == (0, "")
    assert "The others wait for rank 5" in out
    assert "its host launches late" in out
    assert len(out.splitlines()) <= 25
    assert all(len(line) <= 80 for line in out.splitlines())
    files = sorted(traces.iterdir())
    assert run("explain", *files)[1].splitlines()[1:] == out.splitlines()[1:]
    assert str(flopwise.explain(traces)) == out.rstrip("\n")
    assert isinstance(flopwise.explain(files), RanksExplanation)


def test_tables_and_the_record_have_every_rank(run, traces):
    out = run("explain", traces, "--full")[1]
    for title in (
        "For whom the others wait",
        "Ranks, per step",
        "Collectives by process group",
        "Collectives that take longest",
    ):
        assert title in out
    record = json.loads(run("explain", traces, "--format", "json", "--link", "nvlink4,ib400")[1])
    assert record["schema"] == "flopwise.ranks/1"
    assert [one["rank"] for one in record["ranks"]["ranks"]] == list(range(8))
    assert record["ranks"]["straggler"]["cause"] == "host late"
    assert {one["link_bytes_s"] for one in record["ranks"]["groups"]} == {450e9, 50e9}
    assert record["findings"][0]["rule"] == "straggler"


@pytest.mark.slow
def test_the_picture_and_the_page_show_the_lanes(run, traces, tmp_path):
    assert run("explain", traces, "-o", "ranks.svg")[0] == 0
    assert "rank 5" in (tmp_path / "ranks.svg").read_text()
    assert run("report", traces, "-o", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "Who waits for whom" in page
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', page, re.DOTALL)[1])
    lanes = {row["lane"] for row in specs["ranks"]["data"]["values"]}
    assert lanes == {f"rank {n}" for n in range(8)}
    assert run("report", traces, "-o", "page.md")[0] == 0


def test_names_from_outside_stay_text(run, traces, tmp_path):
    for file in traces.iterdir():
        content = json.loads(gzip.decompress(file.read_bytes()))
        content["host_name"] = EVIL
        content["deviceProperties"][0]["name"] = EVIL
        for event in content["traceEvents"]:
            event["name"] = event["name"].replace("ProfilerStep#", f"ProfilerStep#{EVIL}")
            if "Process Group Name" in event["args"]:
                event["args"]["Process Group Name"] += EVIL
                event["args"]["Process Group Description"] = EVIL
        (tmp_path / "t").mkdir(exist_ok=True)
        (tmp_path / "t" / file.name).write_text(json.dumps(content))
    for words in ((), ("--full",), ("--format", "csv"), ("--format", "markdown"), ("--format", "json")):
        code, out, _ = run("explain", "t", *words)
        assert code == 0
        assert not re.search(r"[\x1b\u202e]", out)
    assert run("report", "t", "-o", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "<img src=x" not in page
    assert page.count("</script>") == page.count("<script")


def test_a_bad_file_is_a_line_and_the_rest_is_explained(run, traces, tmp_path):
    shutil.copytree(traces, tmp_path / "t")
    (tmp_path / "t" / "rank3.json.gz").write_bytes((traces / "rank3.json.gz").read_bytes()[:500])
    (tmp_path / "t" / "rank9.json").write_text("not a trace")
    code, out, err = run("explain", "t")
    assert (code, err) == (0, "")
    assert "7 of 8 ranks" in out
    assert "The others wait for rank 5" in out
    assert "Rank3.json.gz is truncated" in out


def test_other_targets_are_as_before(run, traces, tmp_path):
    shutil.copy(COMPILED, tmp_path / "rank0.json.gz")
    shutil.copy(COMPILED, tmp_path / "rank1.json.gz")
    code, out, err = run("explain", "rank0.json.gz", "rank1.json.gz")
    assert code == 0
    assert err.startswith("explained one by one: of 2 traces fewer than two are ranks of one job")
    assert "2 traces, a step of each" in out
    (tmp_path / "empty").mkdir()
    for words, message in (
        (("empty",), "empty is a folder without a trace"),
        ((COMPILED, "--link", "nvlink4"), "--link is of several ranks"),
        ((traces, "--link", "nvlink9"), "there is no link 'nvlink9'"),
        ((traces, "--device", "0", "--link", "ib400"), "--device is of one trace"),
        ((COMPILED, "--on", "ray"), "--on is of several ranks"),
        ((traces, "--on", "slurm"), "on = 'slurm' is not allowed here"),
    ):
        code, out, err = run("explain", *words)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 2


def test_a_folder_with_one_trace_is_that_trace(run, tmp_path):
    (tmp_path / "t").mkdir()
    shutil.copy(COMPILED, tmp_path / "t" / "step.json.gz")
    assert run("explain", "t")[1].splitlines()[1:] == run("explain", COMPILED)[1].splitlines()[1:]


@pytest.mark.slow
def test_a_ray_cluster_reads_the_same(traces, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'flopwise[ray]'")
    folder = tempfile.mkdtemp(prefix="fw", dir="/tmp")  # the names of Ray's sockets must be short
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(flopwise.__file__).parents[1]))
    try:
        assert flopwise.explain(traces, on="ray") == flopwise.explain(traces)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
