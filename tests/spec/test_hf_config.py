"""Hugging Face config files as shapes."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.spec.hf_config import MAX_CONFIG_BYTES, from_config, notes_of, read
from flopwise.spec.model import preset
from flopwise.spec.workload import workload

LLAMA = {  # Llama 3.2 1B
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings":
    True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN2 = {  # Qwen2.5 0.5B
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {  # Qwen3 0.6B: heads wider than d_model / n_heads
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size":
    3072, "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MISTRAL = {  # Mistral 7B v0.1
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024,
    "n_embd": 768, "n_head": 12, "n_inner": None, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
FAMILIES = {c["model_type"]: c for c in (LLAMA, QWEN2, QWEN3, MISTRAL, GPT2)}


def shape(spec):
    return (spec.d_model, spec.d_ff, spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab)


def test_published_configs_give_the_published_shapes():
    assert shape(from_config(LLAMA)) == (2048, 8192, 16, 32, 8, 64, 128256)
    assert shape(from_config(QWEN2)) == (896, 4864, 24, 14, 2, 64, 151936)
    assert shape(from_config(QWEN3)) == (1024, 3072, 28, 16, 8, 128, 151936)
    assert shape(from_config(MISTRAL)) == (4096, 14336, 32, 32, 8, 128, 32000)
    assert shape(from_config(GPT2)) == (768, 3072, 12, 12, 12, 64, 50257)


def test_a_config_and_the_preset_of_the_same_model_agree():
    assert from_config(LLAMA, name="llama3.2-1b") == preset("llama3.2-1b")
    assert from_config(GPT2, name="gpt2") == preset("gpt2")


def test_the_families_differ_where_their_papers_say():
    qwen2, qwen3, gpt2, mistral = (from_config(FAMILIES[f]) for f in ("qwen2", "qwen3", "gpt2", "mistral"))
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)
    assert (gpt2.mlp, gpt2.norm_kind, gpt2.positions, gpt2.tied) == ("gelu", "layer", "learned", True)
    assert (mistral.window, qwen2.window, qwen3.window) == (4096, 0, 0)


def test_a_sliding_window_limits_the_context_of_our_own_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    assert workload(f"hf:{tmp_path}", context=4096).context == 4096
    with pytest.raises(FlopwiseError, match="longer than the sliding window of 4096"):
        workload(f"hf:{tmp_path}", context=4097)
    assert workload(f"hf:{tmp_path}", context=4097, implementation="transformers").hf_config == MISTRAL


def test_where_newer_and_multimodal_files_put_their_fields():
    nested = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}
    }
    assert from_config(nested) == from_config(LLAMA)
    assert from_config({"model_type": "some_vlm", "text_config": LLAMA}) == from_config(LLAMA)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llama", f)
        for f in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ]
    + [("gpt2", f) for f in ("n_embd", "n_layer", "n_head", "vocab_size")],
)
def test_a_missing_field_is_named(family, field):
    for config in ({k: v for k, v in FAMILIES[family].items() if k != field}, FAMILIES[family] | {field: None}):
        with pytest.raises(FlopwiseError, match=f"^some/config.json has no field {field}"):
            from_config(config, source="some/config.json")


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "hidden_size", "2048"),
        ("llama", "hidden_size", 2048.0),
        ("llama", "num_hidden_layers", 0),
        ("llama", "num_key_value_heads", [8]),
        ("llama", "num_key_value_heads", 7),
        ("llama", "rms_norm_eps", "1e-5"),
        ("llama", "rope_theta", {}),
        ("llama", "rope_theta", -1.0),
        ("llama", "attention_bias", "false"),  # once taken as true
        ("llama", "tie_word_embeddings", 1),
        ("llama", "hidden_act", "relu"),
        ("llama", "hidden_act", ["silu"]),
        ("mistral", "sliding_window", []),  # once taken as none
        ("mistral", "sliding_window", "4096"),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "n_inner", -1),
        ("gpt2", "vocab_size", 10**30),
    ],
)
def test_a_mistyped_field_names_the_file_the_field_and_the_value(family, field, value):
    with pytest.raises(FlopwiseError) as error:
        from_config(FAMILIES[family] | {field: value}, source="some/config.json")
    ours = {"num_key_value_heads": "n_kv_heads"}.get(field, field)
    assert error.value.message.startswith("some/config.json")
    assert f"{field} = " in error.value.message or f"{ours} = " in error.value.message
    assert "allowed" in error.value.hint


@pytest.mark.parametrize("theta", [10**400, "10000", True, 0])
def test_a_mistyped_nested_rope_theta_is_named(theta):
    with pytest.raises(FlopwiseError, match="rope_theta = "):
        from_config(LLAMA | {"rope_parameters": {"rope_theta": theta}})


@pytest.mark.parametrize("family", ["mamba", "", 5, [], {"a": 1}, True])
def test_an_unknown_family_names_those_that_are_read(family):
    with pytest.raises(FlopwiseError, match="is not a family") as error:
        from_config(LLAMA | {"model_type": family})
    assert "llama, mistral, qwen2, qwen3, gpt2" in error.value.hint
    with pytest.raises(FlopwiseError, match="has no field model_type"):
        from_config({})


def test_a_file_or_its_folder_is_read_and_named_after_the_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    for path in (folder, folder / "config.json", str(folder)):
        spec, config = read(path)
        assert spec.name == "my-model"
        assert config == QWEN3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"model_type: llama", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b'{"model_type": "\xff"}', "is not JSON"),
        (b"[" * 1_000_000, "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 6000 + b"}", "is not JSON"),
        (b"[]", "holds no JSON object"),
        (b'"llama"', "holds no JSON object"),
        (b" " * (MAX_CONFIG_BYTES + 1), "is too large"),
        (b'{"model_type": ' + b"[" * 500 + b"]" * 500 + b"}", "is not a family"),
    ],
    ids=[
        "empty",
        "cut",
        "yaml",
        "utf-16",
        "bad text",
        "deep list",
        "deep object",
        "huge number",
        "list",
        "word",
        "huge file",
        "nested",
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, text, said):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(FlopwiseError, match=said):
        read(tmp_path)


@pytest.mark.parametrize(
    "path", ["no-such-file", "a\0b", "~no-such-user-here/config.json", "x" * 5000, "/dev/zero", ""]
)
def test_a_path_that_is_no_config_is_one_line(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlopwiseError):
        workload(f"hf:{path}")


FIELDS = st.sampled_from(
    sorted({field for config in FAMILIES.values() for field in config} | {"rope_parameters", "text_config"})
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([1, 2, 4, 64, 10**400])
    | st.floats()
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(config=st.dictionaries(st.text(max_size=6) | FIELDS, JSON, max_size=6))
def test_any_object_is_a_shape_or_one_line(config):
    with contextlib.suppress(FlopwiseError):
        from_config(config)


@given(family=st.sampled_from(sorted(FAMILIES)), changes=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
def test_a_real_config_with_any_damage_is_a_shape_or_one_line(family, changes):
    with contextlib.suppress(FlopwiseError):
        from_config(FAMILIES[family] | changes)


@pytest.mark.parametrize("field", ["num_local_experts", "num_experts", "vision_config", "quantization_config"])
def test_what_no_spec_can_say_is_refused(field):
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, field: {"a": 1} if field.endswith("config") else 8,
    }  # fmt: skip
    with pytest.raises(FlopwiseError, match=field):
        from_config(config)


def test_qwen3_has_heads_of_128_unless_it_says_otherwise():
    config = {
        "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    }  # fmt: skip
    assert from_config(config).head_dim == 128


def changed(tmp_path, config, **changes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return workload(f"hf:{tmp_path}", implementation="transformers", set=changes).hf_config


def test_a_changed_field_is_in_the_config_that_transformers_builds_from(tmp_path):
    assert changed(tmp_path, QWEN2, n_layers=2)["num_hidden_layers"] == 2  # once 24, under a label that said 2
    assert changed(tmp_path, GPT2, n_layers=3, d_model=384)["n_layer"] == 3
    halved = changed(tmp_path, LLAMA, n_heads=16)  # and what follows from it
    assert (halved["num_attention_heads"], halved["head_dim"]) == (16, 128)
    cut = changed(tmp_path, QWEN3 | {"layer_types": ["full_attention"] * 28}, n_layers=2)
    assert cut["layer_types"] == ["full_attention"] * 2


@pytest.mark.parametrize("field", [{"mlp": "gelu"}, {"qkv_bias": True}, {"positions": "learned"}, {"window": 8}])
def test_a_change_that_the_config_cannot_say_is_refused(tmp_path, field):
    with pytest.raises(FlopwiseError, match=f"{next(iter(field))} cannot be set for implementation = 'transformers'"):
        changed(tmp_path, LLAMA, **field)


def test_what_an_account_leaves_out_is_noted():
    assert notes_of(LLAMA) == notes_of(QWEN2) == notes_of(QWEN3) == notes_of(MISTRAL) == notes_of(GPT2) == ()
    assert notes_of({"model_type": "some_vlm", "text_config": LLAMA}) == (
        "text_config alone is accounted for, not the rest of 'some_vlm'",
    )
    assert "attn_pdrop = 0.1" in notes_of(GPT2 | {"attn_pdrop": 0.1, "resid_pdrop": 0.0})[0]
    assert notes_of(GPT2 | {"attn_pdrop": 0.1}, own_model=False) == ()
    assert notes_of(LLAMA | {f"new_{n}": n for n in range(7)}) == (
        "not read: new_0, new_1, new_2, new_3, new_4 and 2 more",
    )


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(FlopwiseError, match="has no fields hidden_size, intermediate_size, num_hidden_layers"):
        from_config({"model_type": "llama", "num_attention_heads": 2, "vocab_size": 10})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [("llama", "num_hidden_layers", 20_000_000), ("gpt2", "n_layer", 20_000_000), ("llama", "num_key_value_heads", 7)],
)
def test_an_error_names_the_files_own_field_and_the_real_limit(family, field, value):
    with pytest.raises(FlopwiseError, match=f"{field} = {value}") as error:
        from_config(FAMILIES[family] | {field: value})
    assert "100000000" not in error.value.hint


def test_a_family_s_own_default_of_kv_heads():
    """transformers takes 8 for a Mistral that does not say."""
    config = {
        "model_type": "mistral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 16, "vocab_size": 100,
    }  # fmt: skip
    assert from_config(config, "m").n_kv_heads == 8
    assert from_config(config | {"model_type": "llama"}, "l").n_kv_heads == 16
