"""Now, reachable and limit: the limit belongs to the model and the GPU, whatever the recipe."""

from pathlib import Path

import msgspec
import pytest

from flopwise.advice.findings import changes
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
    found = [*(part.explanation.reach for part in traced), tuned_reach(tuned.tuning)]
    assert {one.dtype for one in found} == {"bf16"}
    for one in found:
        assert one.limit_ns == pytest.approx(found[-1].limit_ns, rel=0.02)
        assert one.limit_ns < one.reachable_ns < one.now_ns
        assert one.mfu(one.limit_ns) == 1


def test_what_is_reachable_is_the_step_less_what_all_changes_count(parts):
    e = parts[0].explanation
    counted = [one.counted_ns for one in e.findings if one.counted_ns]
    assert e.reach.now_ns == e.step_ns == e.waterfall.step_ns
    assert e.reach.now_ns - e.reach.reachable_ns == pytest.approx(sum(counted))
    assert e.reach.changes == len(counted)
    none = reach(e.step_ns, (), e.waterfall, e.gpu)
    assert (none.reachable_ns, none.changes) == (None, 0)


def test_nothing_is_faster_than_the_limit(parts):
    e = parts[0].explanation
    found = reach(e.step_ns, [0.999 * e.step_ns], e.waterfall, e.gpu)
    assert found.reachable_ns == found.limit_ns


def test_an_unknown_gpu_has_no_limit(parts):
    e = parts[0].explanation
    found = reach(e.step_ns, [1e6], e.waterfall, "Voodoo 2")
    assert (found.limit_ns, found.mfu(1e6)) == (None, None)
    assert found.reachable_ns == e.step_ns - 1e6


def test_a_larger_batch_is_no_part_of_what_is_reachable(parts):
    found = parts[0].findings
    batch = msgspec.structs.replace(found[0], rule="small_batch", counted_ns=1e6, enables=False)
    assert changes((*found, batch)) == changes(found)
