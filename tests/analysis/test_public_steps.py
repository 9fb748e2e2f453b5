"""Steps, verdicts and blame on public traces, against a script that uses nothing of flopwise and what is known of the files."""

from functools import cache
from statistics import median

import pytest
from tests.public_traces import FILES, by_script, needs_public, public_trace

from flopwise.advice.findings import findings
from flopwise.advice.gather import facts_of
from flopwise.analysis.reading import explain_file
from flopwise.analysis.verdict import ALLOCATOR, CAPTURE, GPU, HOST


@cache
def explained(path):
    return explain_file(path, None)


def rules(path):
    return {one.rule: one for one in findings(facts_of(explained(path)))}


@pytest.mark.one_in(5)
@needs_public
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name[:40])
def test_steps_are_those_of_an_independent_script(path):
    e, steps = explained(path).explanation, by_script(path)
    assert e.steps == len(steps)
    for one, (ms, busy) in zip(e.step_times, steps, strict=True):
        assert one.ns / 1e6 == pytest.approx(ms, rel=0.02)
        assert one.busy_ns / 1e6 == pytest.approx(busy, rel=0.02)


@needs_public
@pytest.mark.one_in(5)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name[:40])
def test_steps_add_up_and_the_figures_are_of_the_steady_ones(path):
    e = explained(path).explanation
    steady = [one.ns for one in e.step_times if one.kind == "steady"]
    assert e.steady_steps == len(steady)  # in these files they follow one another
    assert e.window_ns == pytest.approx(sum(steady) / len(steady))
    assert e.step_spread.median_ns == median(steady)
    assert all(0 <= one.busy_ns <= one.ns for one in e.step_times)


def test_work_queued_before_the_trace_is_no_part_of_the_step():
    e = explained(public_trace("tl_h100_Qwen")).explanation
    assert e.window_ns / 1e6 == pytest.approx(34.9, rel=0.02)
    assert e.busy_ns / 1e6 == pytest.approx(31.9, rel=0.02)
    assert (e.steps, e.bound) == (1, GPU)
    assert "queued_before" in e.note_keys


def test_optimizer_steps_are_steps_and_the_first_one_is_cold():
    e = explained(public_trace("param_linear")).explanation
    assert (e.steps, e.steady_steps, e.steps_found_by) == (40, 39, "optimizer steps")
    assert e.step_times[0].kind == "cold"
    assert "cudaFree" in e.step_times[0].why
    assert 20e6 < e.step_spread.median_ns < 30e6


def test_a_cut_iteration_of_a_server_begins_with_its_own_work():
    """The launches wait for the iteration before, whose kernels are not in the file."""
    decode, prefill = (
        explained(public_trace(f"tl_sglang_{what}")).explanation for what in ("decode_sglang", "prefilldecode")
    )
    assert (decode.steps_found_by, decode.bound, prefill.bound) == ("iterations of the server", GPU, GPU)
    assert decode.window_ns < 11e6
    assert prefill.window_ns < 500e6


def test_preprocessing_is_to_blame_and_not_two_short_synchronisations():
    path = public_trace("tl_h100_facebook_timesformer")
    e, found = explained(path).explanation, rules(path)
    assert e.bound == HOST
    assert e.blame[0].what.endswith("video_classification.py(129): preprocess")
    assert e.blame[0].idle_ns / 1e6 == pytest.approx(217.5, rel=0.01)
    assert next(iter(found)) == "host_code"
    assert "host_syncs" not in found


def test_an_allocator_without_a_cache_is_to_blame():
    path = public_trace("tl_mi300_ddp")
    e, found = explained(path).explanation, rules(path)
    assert (e.bound, e.blame[0].what) == (ALLOCATOR, "hipFree")
    assert "CACHING" in found["allocator_calls"].code
    assert "launch_bound" not in found


def test_a_capture_has_nothing_to_change_and_a_replay_no_graph_to_capture():
    captured, replayed = public_trace("tl_sglang_decode_capture"), public_trace("tl_sglang_decode_sglang")
    assert (explained(captured).explanation.bound, rules(captured)) == (CAPTURE, {})
    assert not any(one.levers.get("graph") for one in rules(replayed).values())


@pytest.mark.parametrize("name", ["hta_trace_filter_sampled_rank-0", "hta_trace_filter_sampled_rank-1"])
def test_shampoos_exchange_is_no_reason_for_a_fused_adamw_or_larger_buckets(name):
    found = rules(public_trace(name))
    assert not {"slow_optimizer", "exposed_optimizer"} & set(found)
    assert "DistributedDataParallel" not in found["exposed_communication"].code


@needs_public
@pytest.mark.one_in(5)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name[:40])
def test_inference_is_told_nothing_of_training(path):
    facts = facts_of(explained(path))
    said = " ".join(one.code for one in findings(facts))
    words = ("train_step", "loss.backward", "zero_grad", "optimizer =")
    assert facts.trains or not any(word in said for word in words)
