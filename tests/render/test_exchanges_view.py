"""What is shown of measured collectives: bandwidths and the fitted model, no FLOPs and no tokens."""

import json

from flopwise.records.run import STEP, PhaseTimes, Point, Ran, RunHeader
from flopwise.render.json import json_text
from flopwise.render.listings import points_listing
from flopwise.render.run_charts import sweep_rows
from flopwise.render.run_screen import point_screen
from flopwise.render.run_view import point_table, run_view, sweep_table
from flopwise.render.table import csv_text, markdown
from flopwise.spec.workload import Sampling, Trial, workload
from flopwise.store import StoredRun


def point(n_bytes=10_000_000, ns=10_000_000, ranks=2, target="op:all-gather"):
    trial = Trial(workload=workload(target, set={"bytes": n_bytes}, ranks=ranks), sampling=Sampling(), device="cpu")
    times = PhaseTimes(phase=STEP, wall_ns=(ns,) * 8)
    return Point(key=trial.key(), trial=trial, status="ok", phases=(times,), ran=Ran(device="cpu", backend="gloo"))


SWEEP = [point(10**e, 50_000 + 10**e, ranks) for ranks in (2, 4) for e in (3, 5, 7)]


def stored(points, tmp_path):
    header = RunHeader(id="x", kind="sweep", created_at="", created_ns=0, trials=tuple(p.trial for p in points))
    return StoredRun(path=tmp_path, header=header, points=tuple(points), warnings=())


def test_a_screen_says_both_bandwidths():
    screen = point_screen(point())
    assert screen.verdict == (
        "All-gather of 10.0 MB over 2 ranks by gloo: 10.0 ms; algorithm bandwidth 1.00 GB/s, bus bandwidth 500 MB/s."
    )
    assert not any("MFU" in note or "tokens" in note for note in screen.notes)


def test_a_screen_says_what_was_rounded():
    assert (
        "999,984 of 1,000,000 bytes: whole elements, as many for each rank" in point_screen(point(10**6, ranks=6)).notes
    )
    assert not any("whole elements" in note for note in point_screen(point(10**6, ranks=4)).notes)


def test_tables_have_bandwidths_instead_of_flops():
    for table in (point_table(point()), sweep_table(SWEEP, "x")):
        assert "algorithm_bytes_per_s,bus_bytes_per_s" in csv_text(table)
        assert "mfu" not in csv_text(table)
    assert "| 10.0 MB |" in markdown(sweep_table(SWEEP, "x"))
    assert "| 995 MB/s | 498 MB/s |" in markdown(sweep_table(SWEEP, "x"))


def test_a_run_prints_and_writes_its_model(tmp_path):
    view = run_view(stored(SWEEP, tmp_path))
    assert "| all-gather | 2 | gloo | cpu | 50.0 µs | 500 MB/s |" in markdown(view.tables[-1])
    found = json.loads(json_text(view.document))
    assert [row["ranks"] for row in found["links"]] == [2, 4]
    assert found["points"][0]["exchange"]["bus_bytes_per_s"] > 0
    assert "links" not in run_view(stored(SWEEP[:1], tmp_path)).document


def test_a_listing_has_bandwidths_and_the_model(tmp_path):
    listing = points_listing(stored(SWEEP, tmp_path))
    assert [h.name for h in listing.headings[:5]] == ["bytes", "ranks", "step", "algorithm", "bus"]
    assert listing.rows[2][:5] == ("10.0 MB", "2", "10.1 ms", "995 MB/s", "498 MB/s")
    assert any(note.startswith("all-gather, 4 ranks, gloo on cpu: latency 50.0 µs") for note in listing.notes)


def test_a_chart_is_over_bytes_by_ranks():
    axis, rows = sweep_rows(SWEEP)
    assert axis == "bytes"
    assert sweep_rows([point(n, 10**6, ranks) for ranks in (2, 4, 6) for n in (10**3, 10**6)])[0] == "bytes"
    assert {row["series"] for row in rows} == {"ranks=2", "ranks=4"}
    assert rows[2]["bus_gb_s"] > rows[0]["bus_gb_s"] > 0
