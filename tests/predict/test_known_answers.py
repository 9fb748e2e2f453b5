"""The lecture's and the course's answers come out."""

import pytest

from flopwise.errors import FlopwiseError
from flopwise.predict.fit import bytes_per_parameter, largest_batch, largest_model
from flopwise.predict.flops import DAY_S, matmul_flops, mfu, model_flops, training_time
from flopwise.predict.inference import inference, inference_limit, kv_cache_bytes
from flopwise.spec.gpu import gpu
from flopwise.spec.model import preset
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload

from .course import adamw_flops, course_accounting, course_forward_flops


def test_70b_on_15t_tokens_on_1024_h100s_takes_143_days():
    time = training_time(70e9, 15e12, 1024, gpu("h100").peak("bf16"), mfu=0.5)
    assert int(time.days) == 143
    assert time.flops == 6.3e24


def test_the_largest_model_on_8_h100s_with_adamw_is_40b():
    assert bytes_per_parameter(Recipe()) == 4 + 4 + (4 + 4)
    assert largest_model(8 * gpu("h100").memory_bytes, bytes_per_parameter(Recipe())) == 40e9


def test_the_lectures_linear_layers():
    batch, dim, hidden = 1024, 256, 64
    assert matmul_flops(batch, dim, hidden) == 2 * 1024 * 256 * 64  # 2 · data · parameters
    forward = matmul_flops(batch, hidden, hidden)
    weight = matmul_flops(hidden, batch, hidden)  # ∂W2 = h1ᵀ g
    through = matmul_flops(batch, hidden, hidden)  # ∂h1 = g W2ᵀ
    assert forward + weight + through == 6 * batch * hidden**2


@pytest.mark.parametrize(("item_bytes", "mebibytes"), [(4, 2304), (2, 1152), (1, 576)])
def test_a_linear_layer_from_12k_to_48k(item_bytes, mebibytes):
    """The lecture's d_model of 12k is GPT-3's 12,288: 604M parameters, 2.3 GB in fp32."""
    parameters = matmul_flops(1, 12_288, 4 * 12_288) // 2
    assert parameters * item_bytes == mebibytes * 2**20


def test_the_courses_largest_batch_for_gpt2_xl_in_80_gb():
    course = course_accounting(preset("gpt2-xl"), 1024)
    assert course.fixed_bytes / 1e9 == pytest.approx(26.2, abs=0.1)
    assert course.per_sequence_bytes / 1e9 == pytest.approx(15.5, abs=0.1)
    assert course.largest_batch(80e9) == 3


def test_ours_counts_everything_and_finds_the_same_batch():
    step = workload(
        "gpt2-xl", context=1024, batch=1, attention="naive", norm="eager", activation="eager", optimizer="fused"
    )
    assert largest_batch(step, 80 * 10**9, gpu("a100")) == 3


def test_the_courses_days_to_train_gpt2_xl():
    """400K steps of 1024 sequences on one A100 in fp32 at an MFU of one half."""
    flops = 3 * course_forward_flops(preset("gpt2-xl"), 1024) * 1024 * 400_000
    days = flops / (gpu("a100").peak("fp32") * 0.5) / DAY_S
    assert days == pytest.approx(5_100, rel=0.01)


def test_ours_agrees_with_the_courses_forward_flops_where_the_model_is_the_courses():
    spec = preset("gpt2-xl")
    assert model_flops(spec, 1, 1024, "forward").forward == course_forward_flops(spec, 1024)


def test_the_optimizers_flops_are_nothing_beside_the_models():
    spec = preset("gpt2-xl")
    assert adamw_flops(spec.parameters()) / model_flops(spec, 4, 1024).total < 0.001


def test_llama3_405b_has_the_published_size_and_mfu():
    """Dubey et al. 2024, table 4: 400 TFLOP/s on every H100 are an MFU of 41 % in bf16."""
    assert mfu(400e12, 1.0, gpu("h100").peak("bf16")) == pytest.approx(0.41, abs=0.01)
    assert preset("llama3-405b").parameters() == pytest.approx(405e9, rel=0.01)


def test_decoding_reads_all_weights_for_every_token():
    spec, h100 = preset("llama3-8b"), gpu("h100")
    one = inference(spec, 1, 8192, Recipe(precision="bf16"))
    assert kv_cache_bytes(spec, 1, 8192) == 2 * 32 * 8 * 128 * 8192 * 2
    found = inference_limit(one.decode, h100, "bf16")
    assert found.bound == "bandwidth"
    assert found.tokens_per_s == pytest.approx(h100.bandwidth_bytes_s / (2 * 7.5e9 + one.kv_cache_bytes), rel=0.01)
    assert inference_limit(one.prefill, h100, "bf16").bound == "compute"


def test_a_batch_shares_the_weights_but_not_the_cache():
    spec = preset("llama3-8b")
    one, many = (inference(spec, batch, 1024, Recipe(precision="bf16")).decode for batch in (1, 32))
    assert many.flops == 32 * one.flops
    assert many.read_bytes < 2 * one.read_bytes


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_an_impossible_mfu_is_refused(share):
    with pytest.raises(FlopwiseError, match="mfu"):
        training_time(1e9, 1e9, 1, 1e15, mfu=share)
