"""What helps a step on the CPU: each advice only where its evidence is."""

import inspect
import re

import msgspec
import pytest

from cpu_traces import profiled
from flopwise.advice.findings import host_findings
from flopwise.advice.host_facts import HostFacts
from flopwise.advice.host_rules import ALL_HOST_RULES, cpu_threads
from flopwise.analysis.host_explanation import HostExplanation, HostOp, HostShare
from flopwise.api.explain import explain
from flopwise.records.run import Environment
from flopwise.render.actions import what_to_do
from flopwise.render.explain_screen import changes_of
from flopwise.render.screen import WIDTH

MS = 1e6
STEP = HostExplanation(
    path="t.json",
    source="kineto",
    steps=1,
    steps_found_by="profiler steps",
    window_ns=100 * MS,
    outside_ns=20 * MS,
    loading_ns=0.0,
    bound="ops",
    verdict="",
    phases=(
        HostShare(name="forward", wall_ns=70 * MS, outside_ns=15 * MS, share=0.7),
        HostShare(name="optimizer", wall_ns=30 * MS, outside_ns=5 * MS, share=0.3),
    ),
    modules=(),
    ops=(HostOp(name="aten::mm", kind="matmul", self_ns=40 * MS, share=0.4, count=4, mean_ns=10 * MS),),
    phase_kinds={"forward": {"matmul": 40 * MS, "elementwise": 15 * MS}, "optimizer": {"elementwise": 25 * MS}},
)


def found(environment=None, **changes):
    step = msgspec.structs.replace(STEP, **changes)
    return {one.rule: one for one in host_findings(HostFacts(step, environment))}


def of_machine(threads, cores, **switches):
    return Environment(flopwise="", python="", torch="", cpu_cores=cores, cpu_threads=threads, switches=switches)


def test_an_eager_step_is_told_to_compile_and_to_fuse_its_optimizer():
    both = found()
    assert set(both) == {"cpu_eager", "cpu_optimizer"}
    assert both["cpu_eager"].saving_ns == pytest.approx((15 + 15 / 2) * MS)
    assert both["cpu_optimizer"].saving_ns == pytest.approx((5 + 25 / 2) * MS)
    assert both["cpu_eager"].levers == {"compile": "default"}


def test_what_is_compiled_or_fused_already_is_not_advised():
    assert set(found(compiled=True)) == {"cpu_optimizer"}
    assert set(found(fused_optimizer=True)) == {"cpu_eager"}


def test_the_profilers_own_time_is_no_saving():
    """Untraced the step takes 85 ms: of the 20 ms outside the ops, 5 are left at the least."""
    alone = found(host_ns={"step": 85 * MS})
    assert alone["cpu_eager"].saving_ns == pytest.approx((15 * 5 / 20 + 15 / 2) * MS)


def test_threads_are_advised_only_where_the_run_says_how_many_there_were():
    assert "cpu_threads" not in found()
    assert "cpu_threads" not in found(of_machine(4, 8 - 1))
    one = found(of_machine(1, 8, OMP_NUM_THREADS="1"))["cpu_threads"]
    assert one.saving_ns == pytest.approx(40 * MS * 7 / 8)
    assert "OMP_NUM_THREADS=1" in one.evidence
    assert cpu_threads.check(HostFacts(msgspec.structs.replace(STEP, phase_kinds={}), of_machine(1, 8))) is None


def test_savings_add_up_to_no_more_than_the_step():
    all_of_them = found(of_machine(1, 64), loading_ns=60 * MS, double_ns=40 * MS)
    assert set(all_of_them) == {"cpu_data_loading", "cpu_eager", "cpu_optimizer", "cpu_threads", "cpu_double"}
    assert sum(one.counted_ns for one in all_of_them.values()) <= 100 * MS


@pytest.mark.parametrize("rule", ALL_HOST_RULES, ids=lambda rule: rule.__name__.rpartition(".")[2])
def test_every_host_rule_says_what_it_looks_for_what_it_saves_and_how_to_fix_it(rule):
    assert all(f"\n{word}: " in rule.__doc__ for word in ("Looks for", "Saving", "Fix"))


def test_fp64_a_loader_without_workers_and_a_fused_optimizer_are_seen_in_real_traces(tmp_path):
    pytest.importorskip("torch")
    profiled(tmp_path / "double.json", dtype="float64", fused=True)
    profiled(tmp_path / "single.json", loader=False)
    double, single = (
        {one.rule: one for one in explain(tmp_path / f"{name}.json").findings} for name in ("double", "single")
    )
    assert explain(tmp_path / "double.json").double_ns > 0
    assert explain(tmp_path / "single.json").double_ns == 0
    assert "has no workers" in double["cpu_data_loading"].evidence[0]
    assert "cpu_data_loading" not in single
    assert "cpu_optimizer" not in double
    assert "cpu_optimizer" in single


def test_data_loading_is_counted_by_the_untraced_clock():
    half = {"step": STEP.window_ns / 2}
    by_share = found(loading_ns=40 * MS, host_ns=half)["cpu_data_loading"]
    assert by_share.saving_ns == pytest.approx(20 * MS)
    measured = found(loading_ns=40 * MS, host_ns=half, waited_for_data_ns=3.0 * MS)["cpu_data_loading"]
    assert measured.saving_ns == 3 * MS
    assert "cpu_data_loading" not in found(loading_ns=40 * MS, host_ns=half, waited_for_data_ns=0.0)


def test_no_findings_together_save_more_than_the_untraced_step():
    """However much the profiler added: ops that took longer than the whole untraced step are counted as shorter."""
    for untraced in (1, 20, 50, 90, 100):
        all_of_them = found(of_machine(1, 64), loading_ns=10 * MS, double_ns=40 * MS, host_ns={"step": untraced * MS})
        for one in all_of_them.values():
            assert 0 < one.saving_ns < untraced * MS
    assert found(host_ns={"step": 40 * MS})["cpu_optimizer"].saving_ns == pytest.approx(25 / 2 * MS * 40 / 80)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Shampoo"])
def test_advice_on_the_optimizer_names_the_users_own_and_an_option_it_has(name):
    """The law: the class is the user's, and torch's class of that name takes the option."""
    torch = pytest.importorskip("torch")
    one = found(optimizers=(name,)).get("cpu_optimizer")
    takes_it = "fused" in inspect.signature(getattr(torch.optim, name, object)).parameters
    assert (one is not None) == takes_it
    if one is not None:
        (line,) = [change.line for change in changes_of([one])]
        assert f"torch.optim.{name}(" in line
        assert what_to_do(one) == "Use the fused optimizer"


def test_the_optimizers_class_is_read_from_a_real_trace(tmp_path):
    pytest.importorskip("torch")
    profiled(tmp_path / "t.json", loader=False)
    assert explain(tmp_path / "t.json").optimizers == ("AdamW",)


@pytest.mark.parametrize("cores", [2, 4, 64])
@pytest.mark.parametrize("workers", [0, 1, 2, 8, None])
def test_a_loader_is_told_of_more_workers_than_it_has_or_of_none(workers, cores):
    """The law: a number that is advised is larger than now and at most the cores; it can be read whole."""
    loaders = ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",) if workers == 0 else ()
    one = found(of_machine(cores, cores), loading_ns=40 * MS, loaders=loaders, loader_workers=workers)
    (change,) = changes_of([one["cpu_data_loading"]])
    advised = re.search(r"num_workers=(\d+)", change.line)
    assert advised is None or (workers or 0) < int(advised[1]) <= max(2, cores)
    if workers is not None and workers >= cores:
        assert advised is None


def test_lines_to_type_are_not_cut():
    everything = {"loading_ns": 60 * MS, "double_ns": 40 * MS, "loader_workers": 2}
    for threads in (1, 2):
        for change in changes_of(found(of_machine(threads, 2), **everything).values()):
            assert len(change.line) <= WIDTH - 5


@pytest.mark.parametrize(("ranks", "advised"), [(1, 8), (2, 4), (4, 2), (8, None)])
def test_ranks_share_the_cores(ranks, advised):
    there = msgspec.structs.replace(of_machine(1, 8), local_ranks=ranks)
    one = found(there).get("cpu_threads")
    assert (one is None) == (advised is None)
    if one is not None:
        assert f"set_num_threads({advised})" in one.code
        assert one.saving_ns == pytest.approx(40 * MS * (1 - 1 / advised))
