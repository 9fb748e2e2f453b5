"""The levers: names, values, files."""

import msgspec
import pytest

from flopwise.errors import FlopwiseError
from flopwise.spec.recipe import CHOICES, LEVERS, Recipe, parse_checkpoint, read_toml, recipe_from
from flopwise.spec.workload import workload


@pytest.mark.parametrize(("lever", "value"), [(lever, value) for lever, values in CHOICES.items() for value in values])
def test_every_choice_is_taken(lever, value):
    given = {lever: value} | ({"optimizer": "fused"} if lever == "graph" else {})
    assert getattr(recipe_from(given), lever) == value


@pytest.mark.parametrize("lever", CHOICES)
@pytest.mark.parametrize("value", ["", "no-such", 5, None, [], {}, True])
def test_a_value_that_is_not_allowed_is_named_with_those_that_are(lever, value):
    if lever in ("graph", "overlap") and value is True:
        assert getattr(recipe_from({lever: True}), lever) == "on"
        return
    with pytest.raises(FlopwiseError) as error:
        recipe_from({lever: value})
    assert f"{lever} = " in error.value.message
    assert all(choice in error.value.hint for choice in CHOICES[lever])


def test_an_unknown_lever_names_the_close_one():
    with pytest.raises(FlopwiseError, match="no field 'precison'") as error:
        recipe_from({"precison": "bf16"})
    assert "did you mean 'precision'?" in error.value.hint


def test_fp16_in_a_graph_needs_the_optimizer_that_decides_on_the_gpu():
    with pytest.raises(FlopwiseError, match="fp16"):
        recipe_from({"graph": "on", "precision": "fp16"})
    assert recipe_from({"graph": "on", "precision": "fp16", "optimizer": "fused"}).graph == "on"


@pytest.mark.parametrize(("value", "blocks"), [("off", 0), (0, 0), ("0", 0), (3, 3), ("12", 12)])
def test_checkpointing_is_off_or_a_number_of_blocks(value, blocks):
    assert parse_checkpoint(value) == blocks
    assert recipe_from({"checkpoint": value}).checkpoint == blocks


@pytest.mark.parametrize(
    "value", ["on", -1, 1.5, True, None, [], "9" * 5000, 10**5000, 100_001], ids=lambda v: type(v).__name__
)
def test_any_other_checkpointing_is_refused(value):
    with pytest.raises(FlopwiseError, match="checkpoint = ") as error:
        recipe_from({"checkpoint": value})
    assert "allowed: " in error.value.hint


def test_only_what_was_changed_is_told():
    assert Recipe().changed() == {}
    assert list(recipe_from({"checkpoint": 2, "precision": "bf16"}).changed()) == ["precision", "checkpoint"]
    assert tuple(msgspec.structs.asdict(Recipe())) == LEVERS


@pytest.mark.parametrize(
    "text",
    [b"a = ", b"\xff", b"a = " + b"[" * 100_000, b"a = " + b"9" * 6000, b"a = 1\na = 2", b"x" * (2**20 + 1)],
    ids=["broken", "not utf-8", "deep", "huge number", "twice", "huge"],
)
def test_a_file_that_is_not_toml_is_one_line(tmp_path, text):
    (tmp_path / "r.toml").write_bytes(text)
    with pytest.raises(FlopwiseError, match=r"r\.toml is (not valid TOML|too large)"):
        read_toml(tmp_path / "r.toml", "a recipe")


@pytest.mark.parametrize("path", ["no-such.toml", "/", "a\0b", "~no-such-user-here/x.toml", "/dev/zero"])
def test_a_file_that_cannot_be_read_is_one_line(path):
    with pytest.raises(FlopwiseError):
        read_toml(path, "a recipe")


def test_updates_in_the_backward_pass_cannot_wait_for_loss_scaling():
    with pytest.raises(FlopwiseError, match="looks at all gradients before any update"):
        recipe_from({"overlap": "on", "precision": "fp16"})
    assert recipe_from({"overlap": True, "precision": "bf16"}).overlap == "on"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_updates_in_the_backward_pass_need_an_optimizer(phase):
    with pytest.raises(FlopwiseError, match=f"overlap = 'on' is about the optimizer, and phase = '{phase}' has none"):
        workload("tiny", overlap="on", phase=phase)


def test_a_recipe_of_before_reads_as_one_without_overlap():
    old = {k: v for k, v in msgspec.to_builtins(Recipe(precision="bf16")).items() if k != "overlap"}
    assert msgspec.convert(old, Recipe) == Recipe(precision="bf16")


def test_several_values_at_once_are_told_where_they_belong():
    with pytest.raises(FlopwiseError) as told:
        Recipe(norm="torch,triton")
    assert "flopwise sweep" in told.value.hint
    with pytest.raises(FlopwiseError) as told:
        Recipe(norm="torch,nothing")
    assert "flopwise sweep" not in told.value.hint
