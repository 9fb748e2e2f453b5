"""Sweep files: products, groups, exclusions."""

import contextlib
import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwise.errors import FlopwiseError
from flopwise.spec import sweep as module
from flopwise.spec.sweep import AXES, MAX_POINTS, Sweep, read_sweep, sweep_from

FILE = """
name = "end-to-end"

[base]
batch = 4
samples = 5

[group.forward]
workload = ["small", "medium"]
precision = ["fp32", "bf16"]
exclude = [{ workload = "medium", precision = "fp32" }]

[group.long]
workload = "tiny"
batch = [1, 2]
context = 256
"""


def rows(sweep, *fields):
    return [tuple(getattr(t.workload, f, None) or getattr(t.workload.recipe, f) for f in fields) for t in sweep.trials]


def test_lists_expand_to_the_product_in_the_file_s_order_without_what_is_excluded(tmp_path):
    (tmp_path / "file.toml").write_text(FILE)
    sweep = read_sweep(tmp_path / "file.toml")
    assert sweep.name == "end-to-end"
    assert [
        (t.group, t.workload.target, t.workload.batch, t.workload.context, t.workload.recipe.precision)
        for t in sweep.trials
    ] == [
        ("forward", "small", 4, 512, "fp32"),
        ("forward", "small", 4, 512, "bf16"),
        ("forward", "medium", 4, 512, "bf16"),
        ("long", "tiny", 1, 256, "fp32"),
        ("long", "tiny", 2, 256, "fp32"),
    ]
    assert {t.sampling.samples for t in sweep.trials} == {5}


def test_the_product_has_every_combination_once():
    sweep = sweep_from({"base": {"workload": ["tiny", "small"], "batch": [1, 2, 3], "precision": ["fp32", "bf16"]}})
    assert rows(sweep, "target", "batch", "precision") == [
        (t, b, p) for t in ("tiny", "small") for b in (1, 2, 3) for p in ("fp32", "bf16")
    ]


def test_a_group_overrides_the_base_and_what_the_command_line_says_overrides_both():
    table = {"base": {"workload": "tiny", "batch": [1, 2]}, "group": {"g": {"batch": 8}, "h": {}}}
    assert rows(sweep_from(table), "batch") == [(8,), (1,), (2,)]
    assert {t.device for t in sweep_from(table, overrides={"device": "cpu"}).trials} == {"cpu"}
    assert rows(sweep_from(table, overrides={"batch": 3}), "batch") == [(3,), (3,)]


def test_duplicates_are_merged():
    sweep = sweep_from({"base": {"workload": ["tiny", "tiny"], "batch": [1, 1, 2], "seconds": [10, 10.0]}})
    assert rows(sweep, "batch") == [(1,), (2,)]
    assert len({t.key() for t in sweep.trials}) == 2


def test_exclusions_of_the_file_hold_for_every_group_and_a_list_means_any_of_them():
    table = {
        "base": {"workload": "tiny", "batch": [1, 2, 4, 8]},
        "exclude": [{"batch": 1}],
        "group": {"g": {"exclude": [{"batch": [2, 4], "workload": "tiny"}]}, "h": {}},
    }
    assert [(t.group, t.workload.batch) for t in sweep_from(table).trials] == [("g", 8), ("h", 2), ("h", 4), ("h", 8)]


def test_fields_of_the_model_and_of_operations_are_axes():
    sweep = sweep_from(
        {"group": {"m": {"workload": "tiny", "n_layers": [1, 3]}, "o": {"workload": "op:matmul", "dim": [8, 16]}}}
    )
    subjects = [t.workload.subject for t in sweep.trials]
    assert [s.n_layers for s in subjects[:2]] == [1, 3]
    assert [s.dims["k"] for s in subjects[2:]] == [8, 16]


def test_keys_do_not_depend_on_the_order_of_fields_in_the_file():
    one = sweep_from({"base": {"workload": "tiny", "batch": 2, "precision": "bf16", "seconds": 3}})
    two = sweep_from({"base": {"seconds": 3, "precision": "bf16", "batch": 2, "workload": "tiny"}})
    assert one == two
    assert one.trials[0].key() == two.trials[0].key()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"bases": {}}, "the sweep has no field 'bases'"),
        ({"base": 5}, "base = 5"),
        ({"group": []}, "group = []"),
        ({"group": {"g": 5}}, "group.g = 5"),
        ({"group": {"g": {}}}, "group 'g' names no workload"),
        ({"base": {"workload": "tiny", "bach": 1}}, "no field 'bach' (value 1)"),
        ({"base": {"workload": 5}}, "workload = 5"),
        ({"base": {"workload": [["tiny"]]}}, "workload = ['tiny']"),
        ({"base": {"workload": "tiny", "batch": 0}}, "batch = 0"),
        ({"base": {"workload": "tiny", "batch": datetime.date(2026, 1, 1)}}, "batch = 2026-01-01"),
        ({"base": {"workload": "tiny", "device": 5}}, "device = 5"),
        ({"base": {"workload": "tiny", "seconds": "x"}}, "seconds = 'x'"),
        ({"base": {"workload": "tiny", "batch": []}}, "the sweep has no points"),
        ({"base": {"workload": "tiny"}, "exclude": [{"workload": "tiny"}]}, "the sweep has no points"),
        ({"base": {"workload": "tiny"}, "group": {}}, "the sweep has no points"),
        ({"base": {"workload": "tiny"}, "exclude": {"batch": 1}}, "exclude = "),
        ({"base": {"workload": "tiny"}, "exclude": [{}]}, "exclude = "),
        ({"base": {"workload": "tiny"}, "exclude": [{"bach": 1}]}, "exclude has no field 'bach'"),
        ({"base": {"workload": "tiny"}, "name": ["x"]}, "name = ['x']"),
        (
            {"base": {"workload": "tiny", "batch": list(range(1, 102)), "context": list(range(1, 102))}},
            "expands to 10201 points",
        ),
    ],
)
def test_what_is_wrong_is_named(table, said):
    with pytest.raises(FlopwiseError) as error:
        sweep_from(table)
    assert said in error.value.message
    assert error.value.hint


def test_many_groups_together_have_the_same_limit(monkeypatch):
    monkeypatch.setattr(module, "MAX_POINTS", 5)
    table = {"base": {"workload": "tiny", "batch": [1, 2]}, "group": {name: {} for name in "abc"}}
    with pytest.raises(FlopwiseError, match="the sweep expands to 6 points or more"):
        sweep_from(table)
    assert MAX_POINTS == 10_000


def test_the_file_is_named_in_what_is_said_about_it(tmp_path):
    (tmp_path / "bad.toml").write_text("[base]\nworkload = 'tiny'\nbatch = 0\n")
    with pytest.raises(FlopwiseError, match=r"bad\.toml: batch = 0 is not allowed"):
        read_sweep(tmp_path / "bad.toml")


SCALARS = (
    st.booleans() | st.integers() | st.integers(1, 64) | st.floats() | st.text(max_size=6) | st.dates() | st.times()
    | st.sampled_from(["tiny", "op:matmul", "bf16", "forward", "cpu", "sdpa", "off", "on", 10**400])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(AXES) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
AXIS_TABLES = st.dictionaries(st.sampled_from([*AXES, "workload", "exclude"]) | st.text(max_size=4), VALUES, max_size=4)
LIKELY = st.builds(lambda axes: {"workload": ["tiny", "op:gelu"]} | axes, AXIS_TABLES)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "name": VALUES,
        "base": AXIS_TABLES | LIKELY | VALUES,
        "group": st.dictionaries(st.text(max_size=4), AXIS_TABLES | LIKELY | VALUES, max_size=3) | VALUES,
        "exclude": st.lists(AXIS_TABLES, max_size=2) | VALUES,
    },
)


@settings(max_examples=300, deadline=None)
@given(table=TABLES | st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_any_table_is_a_sweep_or_one_line(table):
    with contextlib.suppress(FlopwiseError):
        sweep = sweep_from(table)
        assert isinstance(sweep, Sweep)
        assert len({t.key() for t in sweep.trials}) == len(sweep.trials) > 0


def test_a_rule_leaves_out_what_is_so_by_default():
    with pytest.raises(FlopwiseError, match="no points"):
        sweep_from({"group": {"a": {"workload": "tiny", "exclude": [{"batch": 4}]}}})
    kept = sweep_from({"group": {"a": {"workload": ["tiny", "small"], "exclude": [{"d_model": 768}]}}})
    assert [t.workload.target for t in kept.trials] == ["tiny"]


def test_a_factory_s_arguments_are_swept_like_a_model_s_fields():
    own = {"workload": "py:a:b", "width": [8, 16], "batch": [1, 2], "exclude": [{"width": 16, "batch": 2}]}
    trials = sweep_from({"group": {"own": own}}).trials
    assert [trial.workload.subject.arguments for trial in trials] == [
        {"width": 8, "batch": 1},
        {"width": 8, "batch": 2},
        {"width": 16, "batch": 1},
    ]
    with pytest.raises(FlopwiseError, match="has no field 'width'"):
        sweep_from({"group": {"own": own | {"workload": "tiny"}}})


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "sweeps").glob("*.toml")), ids=lambda file: file.stem
)
def test_a_sweep_file_that_we_ship_is_one(file):
    assert read_sweep(file).name == file.stem
