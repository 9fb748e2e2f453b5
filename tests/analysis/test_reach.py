"""Now, reachable and limit: the limit belongs to the model and the GPU, whatever the recipe."""

from pathlib import Path

import pytest

from flopwise.analysis.reach import reach, tuned_reach
from flopwise.api.report import gather

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "tests" / "trace" / "fixtures"
TUNED = ROOT / "benchmarks" / "results" / "h200-2026-11-tune-final" / "small-4x512"


@pytest.fixture(scope="module")
def parts():
    traces = [TRACES / f"h200-small-{kind}-2steps.kineto.json.gz" for kind in ("fp32-naive", "bf16-compiled")]
    return [gather(target) for target in (*traces, TUNED)]


def test_one_model_has_one_limit_in_whatever_precision_it_runs(parts):
    *traced, tuned = parts
    found = [reach(part.waterfall, part.findings, part.explanation.gpu) for part in traced]
    found.append(tuned_reach(tuned.tuning))
    assert {one.dtype for one in found} == {"bf16"}
    for one in found:
        assert one.limit_ns == pytest.approx(found[-1].limit_ns, rel=0.02)
        assert one.limit_ns < one.reachable_ns < one.now_ns
        assert one.mfu(one.limit_ns) == 1


def test_what_is_reachable_is_the_step_less_what_the_findings_count(parts):
    part = parts[0]
    saved = sum(one.counted_ns or 0 for one in part.findings)
    found = reach(part.waterfall, part.findings, part.explanation.gpu)
    assert found.now_ns - found.reachable_ns == pytest.approx(saved)
    assert reach(part.waterfall, (), part.explanation.gpu).reachable_ns is None


def test_an_unknown_gpu_has_no_limit(parts):
    part = parts[0]
    found = reach(part.waterfall, part.findings, "Voodoo 2")
    assert (found.limit_ns, found.mfu(1e6)) == (None, None)
