"""A server's iterations: what their names say, what decoding cannot do without, and the advice that follows."""

import json
from functools import cache

import msgspec
import pytest
from tests.public_traces import needs_public, public_trace

from flopwise.advice.facts import Facts
from flopwise.advice.rules import decode_attention, decode_batch, decode_matmul, long_prefill, ungraphed_decode
from flopwise.analysis.explanation import Share, explain_trace
from flopwise.analysis.serving import IterationKind, Serving, _with_decoding, by_model, mismatch
from flopwise.analysis.step_times import STEADY, StepTime
from flopwise.api.explain import explain
from flopwise.errors import FlopwiseError
from flopwise.render.explain_screen import explanation_screen
from flopwise.spec.gpu import gpu
from flopwise.trace.iterations import DECODE, EMPTY, MIXED, PREFILL, Batch, batch_of

MS, GB = 1e6, 1e9


@pytest.mark.parametrize(
    ("name", "kind", "figures"),
    [  # requests and tokens of prompts, requests, tokens and context of those that decode
        ("execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)", MIXED,
         (9, 8155, 37, 37, 34489)),
        ("execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)", DECODE, (0, 0, 32, 32, 32785)),
        ("execute_context_2(512)_generation_30(30)", MIXED, (2, 512, 30, 30, None)),
        ("execute_context_0(0)_generation_8(24)", DECODE, (0, 0, 8, 24, None)),
        ("execute_new_1_cached_0", PREFILL, (1, None, 0, None, None)),
        ("step[EXTEND bs=15 toks=15360]", PREFILL, (15, 15360, 0, None, None)),
        ("step[DECODE bs=32]", DECODE, (0, None, 32, None, None)),
        ("[Executor] _forward_step 7: 2 ctx reqs, 30 gen reqs", MIXED, (2, None, 30, None, None)),
    ],
)  # fmt: skip
def test_the_name_of_an_iteration_says_what_it_serves(name, kind, figures):
    found = batch_of(name)
    assert found.kind == kind
    assert (
        found.prefill_requests,
        found.prefill_tokens,
        found.decode_requests,
        found.decode_tokens,
        found.decode_context,
    ) == figures


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("execute_context_9(sq99999999999999999999sk8430)_generation_37(sq37sk99999999999999999999)", (None, 37, None)),
        ("step[EXTEND bs=4 toks=99999999999999999999]", (None, None, None)),
        ("step[DECODE bs=99999999999999999999]", None),
        ("execute_context_99999999999999999999(1)_generation_1(1)", None),
        ("execute_new_1_cached_99999999999999999999", None),
    ],
)
def test_a_number_too_large_is_not_cut_to_another_one(name, expected):
    """A past bug: 999,999,999,999 tokens, 6.39T a second."""
    found = batch_of(name)
    if expected is None:
        assert found is None or found.kind == EMPTY
    else:
        assert (found.prefill_tokens, found.decode_tokens, found.decode_context) == expected


@pytest.mark.parametrize("name", ["decode", "execute_model", "step 3", "ProfilerStep#4", "execute_query(3)"])
def test_other_names_say_nothing_of_it(name):
    assert batch_of(name) is None


@cache
def served(**fields):
    """An explanation of a step of 10 ms: 6 of matmuls, 2 of attention; with what is given."""
    from tests.analysis.test_explanation import trace

    e = explain_trace(trace([(0, 10, 1), (20, 30, 2)], [(0, 1, 1), (2, 3, 2)]))
    classes = {"forward": {"matmul": 6 * MS, "attention": 2 * MS}}
    shares = tuple(Share(name=name, gpu_ns=ns, share=0.5, count=1) for name, ns in classes["forward"].items())
    whole = {
        "phase_classes": classes,
        "classes": shares,
        "window_ns": 10 * MS,
        "busy_ns": 9 * MS,
        "untraced_step": None,
    }
    return msgspec.structs.replace(e, **whole | {"gpu_ns": 9 * MS, "findings": None} | fields)


def kind(name, ns, count=1, requests=32, tokens=0, context=None):
    decoding = 0 if name == PREFILL else requests
    return IterationKind(
        kind=name, count=count, ns=ns, requests=requests, prefill_tokens=tokens, decode_requests=decoding,
        context_tokens=context, tokens_per_s=None,
    )  # fmt: skip


def facts(*kinds, step_times=(), weights=None, cache_bytes=None):
    found = Serving(kinds=kinds, weights_bytes=weights, decode_cache_bytes=cache_bytes)
    return Facts(explanation=served(serving=found, step_times=step_times), gpu=gpu("h100"))


def test_decoding_is_measured_against_the_bytes_it_reads():
    """10 GB at 80 % of 3.35 TB/s take 3.7 ms of the matmuls' 6; 2 GB take 0.75 ms of attention's 2."""
    decoding = facts(kind(DECODE, 10 * MS), weights=10 * GB, cache_bytes=2 * GB)
    matmul, attention = decode_matmul.check(decoding), decode_attention.check(decoding)
    assert matmul.values["bytes_per_s"] == pytest.approx(10 * GB / 6e-3)
    assert sum(matmul.draws_on.values()) == pytest.approx(6 * MS - 10 * GB / (0.8 * 3352 * GB) * 1e9)
    assert sum(attention.draws_on.values()) == pytest.approx(2 * MS - 2 * GB / (0.8 * 3352 * GB) * 1e9)
    assert matmul.evidence_ns == pytest.approx(6 * MS)


def test_what_reads_fast_enough_or_is_not_known_is_not_blamed():
    assert decode_matmul.check(facts(kind(DECODE, 10 * MS), weights=18 * GB)) is None
    assert decode_attention.check(facts(kind(DECODE, 10 * MS), cache_bytes=6 * GB)) is None
    assert decode_matmul.check(facts(kind(DECODE, 10 * MS))) is None
    assert decode_matmul.check(facts(kind(PREFILL, 10 * MS), weights=10 * GB)) is None
    assert (
        decode_matmul.check(facts(kind(DECODE, 10 * MS, requests=512), weights=10 * GB)) is None
    )  # arithmetic is its limit


def test_a_small_batch_is_told_that_more_requests_share_the_weights():
    found = decode_batch.check(facts(kind(DECODE, 10 * MS, requests=32)))
    assert found.values["shared_ns"] == pytest.approx(7 * MS)
    assert max(found.saving_ns, sum(found.draws_on.values())) <= 3.5 * MS + 1
    assert decode_batch.check(facts(kind(DECODE, 10 * MS, requests=200))) is None


def test_a_prefill_that_others_wait_for_is_chunked():
    both = long_prefill.check(facts(kind(DECODE, 10 * MS, count=3), kind(MIXED, 50 * MS, tokens=4096)))
    assert both.values == {"iteration_ns": 50 * MS, "beyond_ns": 40 * MS}
    assert both.saving_ns == pytest.approx(min(40 * MS / 2 / 4, 10 * MS))
    assert long_prefill.check(facts(kind(DECODE, 10 * MS), kind(MIXED, 15 * MS, tokens=4096))) is None
    assert long_prefill.check(facts(kind(PREFILL, 50 * MS, tokens=9000))) is None  # nobody decodes
    assert long_prefill.check(facts(kind(MIXED, 50 * MS, tokens=100))) is None


def test_of_mixed_and_pure_prefills_the_one_that_delays_most_is_named():
    """A past bug: where a short mixed batch was there, a prefill of 50 ms between two tokens was not looked at."""
    short = (kind(DECODE, 10 * MS, count=3), kind(MIXED, 12 * MS, tokens=64))
    assert long_prefill.check(facts(*short)) is None
    found = long_prefill.check(facts(*short, kind(PREFILL, 50 * MS, tokens=4096)))
    assert found.values["iteration_ns"] == 50 * MS
    mixed = (kind(DECODE, 10 * MS, count=3), kind(MIXED, 40 * MS, count=5, tokens=64))
    assert long_prefill.check(facts(*mixed, kind(PREFILL, 50 * MS, tokens=4096))).values["iteration_ns"] == 40 * MS


def test_the_time_of_an_output_token_has_the_prefills_between_in_its_mean():
    """Prefills before the first token and after the last delay none; of a batch with speculation a token takes less."""
    took = [(90, PREFILL, 0), (10, DECODE, 8), (50, PREFILL, 0), (10, DECODE, 8), (20, DECODE, 16), (70, PREFILL, 0)]
    batches = [
        (ns, Batch(prefill_requests=1, prefill_tokens=9))
        if what == PREFILL
        else (ns, Batch(decode_requests=8, decode_tokens=made))
        for ns, what, made in took
    ]
    found = _with_decoding(Serving(kinds=()), batches)
    assert found.output_token_ns == 10
    assert found.output_token_mean_ns == pytest.approx((10 + 50 + 10 + 20) / (1 + 1 + 2))
    assert found.output_tokens_per_s == pytest.approx(32 / 250 * 1e9)


def iterations(*took, in_graphs):
    return tuple(
        StepTime(
            number=i + 1, name="", start_ns=0, ns=int(ns), busy_ns=0, launches=1, kind=STEADY, in_graphs=held,
            batch=Batch(decode_requests=8 + i),
        )
        for i, (ns, held) in enumerate(zip(took, in_graphs, strict=True))
    )  # fmt: skip


def test_decoding_without_a_graph_is_compared_with_decoding_in_one():
    steps = iterations(10 * MS, 10 * MS, 30 * MS, 10 * MS, in_graphs=(True, True, False, True))
    found = ungraphed_decode.check(facts(kind(DECODE, 10 * MS, count=4), step_times=steps))
    assert found.saving_ns == pytest.approx(20 * MS / 4)
    assert "batches of 10" in found.evidence[0]
    alike = iterations(10 * MS, 10 * MS, in_graphs=(True, True))
    assert ungraphed_decode.check(facts(kind(DECODE, 10 * MS, count=2), step_times=alike)) is None


@needs_public
def test_sglangs_decode_reads_qwens_weights_and_its_requests_cache():
    """Qwen3-8B: 36 layers of 4096, 32 heads and 8 of keys and values of 128, 12288 in the MLP, 151936 words, in bf16."""
    e = explain(public_trace("tl_sglang_decode_sglang"))
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    assert e.serving.weights_bytes == 2 * (36 * layer + 151936 * 4096)
    assert e.serving.cache_bytes_per_token == 36 * 2 * 1024 * 2
    assert e.serving.decode_cache_bytes == 32785 * 36 * 2 * 1024 * 2
    assert e.serving.output_token_ns == e.step_times[0].ns
    assert e.reach.limit_ns == pytest.approx(e.serving.decode_bytes / 5.3e12 * 1e9)
    assert e.reach.limit_ns < e.reach.reachable_ns < e.reach.now_ns


@needs_public
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("tl_sglang_prefill", [PREFILL]), ("tl_vllm_prefilldecode", [MIXED]), ("tl_sglang_decode_sglang", [DECODE])],
)
def test_public_servers_are_of_the_kind_they_say(name, kinds):
    e = explain(public_trace(name))
    assert [one.kind for one in e.serving.kinds] == kinds


@pytest.mark.slow
@needs_public
def test_a_named_model_gives_the_bytes_that_a_trace_without_shapes_does_not(tmp_path):
    replay = public_trace("tl_sglang_decode_sglang")
    alone = tmp_path / replay.name  # no capture beside it
    alone.symlink_to(replay)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert explain(alone).serving.weights_bytes is None
    named, joined = explain(alone, model=f"hf:{tmp_path}/config.json"), explain(replay)
    assert named.serving.weights_bytes == joined.serving.weights_bytes
    assert named.serving.decode_cache_bytes == joined.serving.decode_cache_bytes
    assert named.reach.limit_ns == pytest.approx(joined.reach.limit_ns)
    with pytest.raises(FlopwiseError, match="no iteration of a server"):
        explain(public_trace("tl_mi300_ddp"), model="gpt2")


DECODING = Serving(kinds=(IterationKind(kind=DECODE, count=1, ns=10 * MS, requests=32, prefill_tokens=0, decode_requests=32,
                                       context_tokens=32_000, tokens_per_s=None),))  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "per_token", "why"),
    [
        (15.1 * GB, 147_456, ""),
        (1.5 * GB, 147_456, ""),
        (140 * GB, 327_680, "take 28.4 ms at 5.30 TB/s, the GPU works 9.80 ms"),  # faster than the memory
        (1e5, 512, "its matmuls take 5.80 ms"),  # nothing to multiply
    ],
)
def test_a_model_that_cannot_have_been_served_is_refused(weights, per_token, why):
    """A past bug: of a 70B model the limit was 28 ms, and the step that ran took 10."""
    named = by_model(DECODING, weights, per_token)
    found = mismatch(DECODING, named, weights, (5.8 * MS, 9.8 * MS), gpu("mi300x"))
    assert why in found
    assert bool(found) == bool(why)


def test_what_the_traces_own_shapes_say_comes_before_a_named_model():
    traced = msgspec.structs.replace(DECODING, weights_bytes=15.1 * GB)
    for weights, fits in ((15.1 * GB, True), (16 * GB, True), (2 * GB, False), (140 * GB, False)):
        found = mismatch(traced, by_model(traced, weights, 1e5), weights, (5.8 * MS, 9.8 * MS), None)
        assert (found == "") == fits


@needs_public
@pytest.mark.parametrize("model", ["llama3-70b", "tiny"])
def test_another_model_than_the_servers_is_refused(model, tmp_path):
    replay = public_trace("tl_sglang_decode_sglang")
    (tmp_path / replay.name).symlink_to(replay)
    with pytest.raises(FlopwiseError, match=r"is not what .* serves"):
        explain(tmp_path / replay.name, model=model)


QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "hidden_act": "silu",
}  # fmt: skip


@needs_public
def test_a_training_serves_nobody():
    assert explain(public_trace("tl_mi300_ddp")).serving is None


def test_iterations_that_serve_nobody_are_no_server(tmp_path):
    """A past bug: with a model named, a division by the number of iterations that do."""
    call, where = {"args": {"correlation": 3}}, {"ph": "X", "pid": 1, "tid": 1}
    events = [
        {**where, "cat": "user_annotation", "name": "step[DECODE bs=0]", "ts": 0, "dur": 90},
        {**where, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 5, "dur": 2, **call},
        {**where, "cat": "kernel", "name": "sgemm", "ts": 9, "dur": 50, "pid": 0, **call},
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert explain(tmp_path / "t.json").serving is None
    with pytest.raises(FlopwiseError, match="no iteration of a server"):
        explain(tmp_path / "t.json", model="gpt2")


def test_the_screen_says_the_mean_where_it_is_far_from_the_median():
    kinds = (kind(DECODE, 10 * MS, count=3),)
    for mean, said in ((10.5 * MS, "takes 10.0 ms."), (21 * MS, "takes 10.0 ms, 21.0 ms on average.")):
        e = served(serving=Serving(kinds=kinds, output_token_ns=10 * MS, output_token_mean_ns=mean))
        assert any(note.endswith(said) for note in explanation_screen(e).notes)
