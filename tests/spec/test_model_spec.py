"""Shapes: the presets' published numbers, and shapes that cannot be built."""

import pytest

from flopwise.errors import FlopwiseError
from flopwise.spec.model import ModelSpec, preset, preset_names

COURSE = {  # d_model, d_ff, layers, heads
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7B": (2560, 10240, 32, 32),
    "10B": (4608, 12288, 50, 36),
}
MINE = {"name": "mine", "d_model": 64, "d_ff": 128, "n_layers": 2, "n_heads": 4}


@pytest.mark.parametrize("name", COURSE)
def test_the_course_s_models_have_its_numbers(name):
    spec = preset(name)
    assert (spec.d_model, spec.d_ff, spec.n_layers, spec.n_heads) == COURSE[name]
    assert spec.vocab == 10_000
    assert spec.head_dim * spec.n_heads == spec.d_model
    assert spec.n_kv_heads == spec.n_heads


def test_published_models_have_their_published_numbers():
    xl, big = preset("gpt2-xl"), preset("llama3-70b")
    assert (xl.d_model, xl.n_layers, xl.n_heads, xl.vocab, xl.max_context) == (1600, 48, 25, 50_257, 1024)
    assert (big.d_model, big.d_ff, big.n_layers, big.n_heads, big.n_kv_heads) == (8192, 28672, 80, 64, 8)


def test_every_preset_is_found_by_its_name_in_any_case():
    for name in preset_names():
        assert preset(name.upper()) is preset(name.lower()) is preset(name)


def test_an_unknown_preset_names_the_close_one_and_the_others():
    with pytest.raises(FlopwiseError, match="there is no model preset 'smal'") as error:
        preset("smal")
    assert error.value.hint.startswith("did you mean 'small'?")
    assert "hf:PATH/config.json" in error.value.hint


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"d_model": 0}, "d_model = 0", "a whole number from 1 to"),
        ({"d_ff": 2.5}, "d_ff = 2.5", "a whole number from 1 to"),
        ({"n_layers": "2"}, "n_layers = '2'", "a whole number from 1 to"),
        ({"n_layers": True}, "n_layers = True", "a whole number from 1 to"),
        ({"vocab": 10**5000}, "vocab = a very large int", "a whole number from 1 to"),
        ({"head_dim": -2}, "head_dim = -2", "a whole number from 0 to"),
        ({"mlp": "relu"}, "mlp = 'relu'", "swiglu, gelu"),
        ({"norm_kind": ["rms"]}, "norm_kind = ['rms']", "rms, layer"),
        ({"positions": "rop"}, "positions = 'rop'", "did you mean 'rope'? allowed: rope, learned"),
        ({"norm_eps": float("nan")}, "norm_eps = nan", "a number from 0 to 1"),
        ({"rope_theta": float("inf")}, "rope_theta = inf", "a number from 1 to"),
        ({"tied": "false"}, "tied = 'false'", "true, false"),  # once taken as it stood, and true
        ({"qk_norm": 1}, "qk_norm = 1", "true, false"),
        ({"n_heads": 5}, "n_heads = 5 does not divide d_model = 64", "allowed near it: 1, 2, 4, 8"),
        ({"n_kv_heads": 3}, "n_kv_heads = 3 does not divide n_heads = 4", "allowed near it: 1, 2, 4"),
        ({"head_dim": 15}, "head_dim = 15 is odd", "even head_dim"),
        ({"positions": "learned"}, "positions = 'learned' needs max_context", "max_context"),
    ],
)
def test_a_shape_that_cannot_be_built_names_the_field_the_value_and_what_is_allowed(changes, said, hint):
    for build in (lambda: ModelSpec(**(MINE | changes)), lambda: ModelSpec(**MINE).with_fields(changes)):
        with pytest.raises(FlopwiseError) as error:
            build()
        assert said in error.value.message
        assert hint in error.value.hint


def test_what_follows_from_a_changed_field_is_derived_anew():
    small = preset("small")
    assert small.with_fields({"d_model": 1536}).head_dim == 128
    assert small.with_fields({"n_heads": 6}).n_kv_heads == 6
    assert preset("llama3-8b").with_fields({"n_heads": 16}).n_kv_heads == 8  # chosen, not derived: kept
    assert small.with_fields({"head_dim": 32}).head_dim == 32


def test_an_unknown_field_is_named():
    with pytest.raises(FlopwiseError, match=r"the model has no field 'n_layer' \(value 2\)") as error:
        preset("small").with_fields({"n_layer": 2})
    assert "did you mean 'n_layers'?" in error.value.hint


def test_whole_and_decimal_forms_of_one_number_are_one_shape():
    assert repr(ModelSpec(**MINE, rope_theta=10_000)) == repr(ModelSpec(**MINE, rope_theta=10_000.0))


def test_a_models_name_is_text_and_its_own():
    with pytest.raises(FlopwiseError, match="name = 5"):
        ModelSpec(**(MINE | {"name": 5}))
    with pytest.raises(FlopwiseError, match="no field 'name'"):
        ModelSpec(**MINE).with_fields({"name": "other"})
