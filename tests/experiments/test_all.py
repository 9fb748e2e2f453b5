"""`lab all --quick` on the CPU, whole, as a user would run it."""

import html

import pytest

import flopwise
from flopwise.experiments.catalog import experiments


@pytest.mark.slow
def test_every_experiment_ends_in_a_verdict_and_the_page_has_them_all(tmp_path):
    found = flopwise.lab("all", quick=True, device="cpu", runs=tmp_path)
    assert [result.experiment for result in found.results] == list(experiments())
    failed = [(r.experiment, r.status, r.verdict.why) for r in found.results if r.status not in ("ok", "unsupported")]
    assert failed == []
    page = flopwise.report(tmp_path / found.run, output=tmp_path / "lab.html").read_text()
    assert [one.name for one in experiments().values() if html.escape(one.claim) not in page] == []
