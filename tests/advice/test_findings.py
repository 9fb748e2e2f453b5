"""Laws of the ranking: nothing is counted twice, nothing is said of nothing; and what two real traces must say."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.advice.facts import Facts
from flopwise.advice.findings import findings, least_ns, potential_ns, ranked, worth_most
from flopwise.advice.reference import reference
from flopwise.advice.rules import ALL_RULES
from flopwise.analysis.explanation import with_clock
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.records.finding import Finding
from flopwise.records.waterfall import PARTS, Waterfall, WaterfallPart
from flopwise.render.findings_view import NOTHING, findings_view
from flopwise.render.json import json_text
from flopwise.render.terminal import text

from .made import BF16, MS, fixture, point, seen

NAIVE, COMPILED = "h200-small-fp32-naive-2steps.kineto.json.gz", "h200-small-bf16-compiled-2steps.kineto.json.gz"

amounts = st.floats(0, 1e9)
parts = st.dictionaries(st.sampled_from(PARTS), amounts, max_size=4)
said = st.lists(
    st.builds(
        lambda rule, ns, draws, size, lever: Finding(
            rule=rule, title=rule, arithmetic="", saving_ns=ns, draws_on=draws, saving_bytes=size, levers=lever
        ),
        st.sampled_from("abcdef"),
        amounts,
        parts,
        st.sampled_from([0, 2**31]),
        st.sampled_from([{}, {"precision": "bf16"}, {"precision": "tf32"}, {"graph": "on"}]),
    ),
    max_size=8,
)


def stepped(shares):
    """A waterfall whose parts add up to its step."""
    whole = sum(shares.values()) or 1.0
    rows = tuple(WaterfallPart(name=n, ns=ns, share=ns / whole, how="measured") for n, ns in shares.items())
    return Waterfall(step_ns=whole, measured_by="the trace", parts=rows, mfu=None, hfu=None, roofline_share=None)


@given(said, parts, st.booleans())
def test_what_is_counted_is_no_more_than_the_step_and_each_part(found, shares, split):
    falls = stepped(shares)
    facts = Facts(waterfall=falls) if split else seen(("forward", "matmul", "", BF16, MS, 1.0), step=falls.step_ns)
    told = ranked(found, facts)
    counted = [one.counted_ns for one in told]
    assert all(ns is not None and ns >= 0 for ns in counted)
    assert sum(counted) <= falls.step_ns * (1 + 1e-9)
    assert all(ns <= potential_ns(one) * (1 + 1e-9) for ns, one in zip(counted, told, strict=True))
    assert [potential_ns(one) for one in told] == sorted((potential_ns(one) for one in told), reverse=True)
    pulled = [lever for one in told if one.counted_ns for lever in one.levers]
    assert len(pulled) == len(set(pulled))
    assert all(potential_ns(one) >= least_ns(falls.step_ns) or one.saving_bytes for one in told)


def test_two_that_draw_on_the_same_do_not_save_it_twice():
    one = Finding(rule="a", title="", arithmetic="", saving_ns=30 * MS, draws_on={PARTS[3]: 30 * MS})
    two = Finding(rule="b", title="", arithmetic="", saving_ns=20 * MS, draws_on={PARTS[3]: 15 * MS, PARTS[5]: 5 * MS})
    facts = seen(("forward", "matmul", "", BF16, 90 * MS, 1.0))
    assert [found.counted_ns for found in ranked([two, one], facts)] == [30 * MS, 5 * MS]


def test_what_others_stand_in_the_way_of_is_reckoned_too():
    one = Finding(
        rule="a", title="", arithmetic="67 ms − 80 ms = -13 ms", draws_on={PARTS[3]: 30 * MS, PARTS[5]: 5 * MS}
    )
    (found,) = ranked([one], seen(("forward", "matmul", "", BF16, 90 * MS, 1.0)))
    assert found.counted_ns == 35 * MS
    assert found.arithmetic == (
        f"67 ms − 80 ms = -13 ms; once the others are fixed: 30.0 ms of '{PARTS[3]}' + 5.00 ms of '{PARTS[5]}' = 35.0 ms"
    )


def test_of_two_places_of_one_lever_the_better_counts():
    levers = ({"precision": "bf16"}, {"precision": "tf32"})
    found = [
        Finding(rule=f"to {one['precision']}", title="", arithmetic="", saving_ns=ns, draws_on={part: ns}, levers=one)
        for one, ns, part in zip(levers, (30 * MS, 20 * MS), PARTS, strict=False)
    ]
    facts = seen(("forward", "matmul", "", BF16, 90 * MS, 1.0))
    assert [one.counted_ns for one in ranked(found, facts)] == [30 * MS, 0.0]


def test_what_changes_the_training_is_said_last():
    batch = Finding(rule="small_batch", title="", arithmetic="", saving_ns=50 * MS, draws_on={PARTS[11]: 50 * MS})
    graph = Finding(rule="launch_bound", title="", arithmetic="", saving_ns=40 * MS, draws_on={PARTS[11]: 40 * MS})
    told = ranked([batch, graph], seen(("forward", "matmul", "", BF16, 20 * MS, 1.0), late=50 * MS))
    assert [(one.rule, one.counted_ns) for one in told] == [("launch_bound", 40 * MS), ("small_batch", 10 * MS)]


def test_nothing_is_said_where_nothing_is_wrong():
    facts = seen(("forward", "matmul", "", BF16, 97 * MS, 90.0), late=1 * MS)
    assert findings(facts) == ()
    (table,), content = findings_view((), 100 * MS)
    assert table.notes == (NOTHING,)
    assert content["findings"] == []


@pytest.mark.parametrize(("step_ms", "least_ms"), [(100, 1.0), (5, 0.1), (0.4, 0.02)])
def test_what_is_too_small_to_say(step_ms, least_ms):
    assert least_ns(step_ms * MS) == pytest.approx(least_ms * MS)


def test_the_naive_trace_by_itself_is_fp32_first_as_with_its_clock():
    """Traced, the GPU waits for half of the step; untraced, for a tenth. In bf16 it would wait for the host."""
    told = {one.rule: one for one in findings(fixture(NAIVE))}
    assert list(told)[:2] == ["fp32_matmul", "host_next"]
    assert [one.rule for one in told.values() if one.enables] == ["host_next"]
    assert 0 < told["host_next"].saving_ns < told["fp32_matmul"].counted_ns < sum(told["fp32_matmul"].draws_on.values())
    assert "saves only with it" in told["host_next"].arithmetic
    assert {"naive_attention", "slow_optimizer", "unfused_chains"} <= set(told)
    assert "slow_sdpa" not in told
    assert "launch_bound" not in told


def test_advice_whose_reason_is_the_waiting_host_holds_at_the_optimistic_end_or_is_not_given():
    """The compiled step waits for launches; if the profiler had cost more, it would hardly."""
    facts = fixture(COMPILED)
    e = facts.explanation
    step = msgspec.structs.replace(e.untraced_step, low_ns=8 * MS)
    almost = msgspec.structs.replace(e.idle, by_cause_ns=e.idle.by_cause_ns | {LATE_LAUNCH: round(0.5 * MS)})
    other = msgspec.structs.replace(
        facts, explanation=msgspec.structs.replace(e, untraced_step=step, optimistic_idle=almost)
    )
    first, *_ = findings(facts)
    assert first.title.startswith("launch-bound")
    assert "launch_bound" not in [one.rule for one in findings(other)]


def test_the_naive_trace_with_its_untraced_clock_is_fp32_first():
    facts = fixture(NAIVE)
    timed = point(wall=65 * MS, launch=60 * MS, busy=56 * MS, attention="naive", norm="eager", activation="eager")
    facts = msgspec.structs.replace(facts, explanation=with_clock(facts.explanation, timed))
    launches, first, *_ = told = findings(facts)
    assert (launches.levers, first.rule) == ({"graph": "on"}, "fp32_matmul")
    assert first.counted_ns == pytest.approx(36 * MS, rel=0.02)  # bf16 left 2.8 ms of 39 (the compiled trace)
    assert sum(one.counted_ns for one in told) <= 65 * MS
    assert next(one for one in told if one.rule == "tf32_off").counted_ns == 0


def test_a_host_that_is_fast_enough_for_all_changes_needs_none():
    facts = fixture(NAIVE)
    quick = msgspec.structs.replace(facts.details, host_ns=10 * MS)
    found = findings(msgspec.structs.replace(facts, details=quick))
    assert not {"host_next", "launch_bound"} & {one.rule for one in found}
    assert found[0].saving_ns == pytest.approx(found[0].counted_ns)


def test_the_three_worth_most_include_what_they_need():
    found = findings(fixture(NAIVE))
    assert [one.rule for one in worth_most(found)] == ["fp32_matmul", "host_next", "naive_attention"]


def test_the_compiled_trace_is_launch_bound_and_has_no_naive_attention():
    told = {one.rule: one for one in findings(fixture(COMPILED))}
    assert next(iter(told)) == "launch_bound"
    assert not {"naive_attention", "fp32_matmul", "tf32_off", "slow_optimizer", "slow_sdpa", "graph_breaks"} & set(told)


def test_a_finding_is_shown_with_its_arithmetic_evidence_and_code():
    found = findings(fixture(NAIVE))
    tables, content = findings_view(found, 111 * MS)
    whole = "".join(text(table) for table in tables)
    assert "TFLOP/s" in whole
    assert "torch.autocast" in whole
    assert "--precision bf16" in whole
    assert len(tables) == len(found) + 1
    assert content["schema"] == "flopwise.findings/1"
    assert '"rule": "fp32_matmul"' in json_text(content)


def test_the_page_on_the_findings_is_the_rules_own_words():
    page = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"
    assert page.read_text() == reference()


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.__name__.rpartition(".")[2])
def test_every_rule_says_what_it_looks_for_what_it_saves_and_how_to_fix_it(rule):
    assert all(f"\n{word}: " in rule.__doc__ for word in ("Looks for", "Saving", "Fix"))
