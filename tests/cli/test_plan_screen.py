"""What the screen of a plan says: notes on what was changed, other layouts worth a look, days by both conventions."""

import json

import msgspec
import pytest

import flopwise
from flopwise.cli.main import main
from flopwise.render.one_screen import text
from flopwise.render.plan_charts import plan_chart
from flopwise.render.plan_screen import next_best, plan_screen, same
from flopwise.render.ranks_plan import apart

SMALL = {"gpu": "h100", "gpus": 64, "tp": 4, "micro_batch": 1}


@pytest.fixture(scope="module")
def planned():
    return flopwise.plan("llama3-8b", gpu="h100", gpus=64, tokens=15e12)


def shown(**given):
    found = flopwise.plan("llama3-8b", **SMALL | given)
    return " ".join(text(plan_screen(found)).split())


def slower(one, share, **layout):
    step = msgspec.structs.replace(one.step, wall_s=one.step.wall_s * (1 + share))
    return msgspec.structs.replace(one, step=step, layout=msgspec.structs.replace(one.layout, **layout))


def test_a_batch_in_tokens_that_is_rounded_is_said():
    assert "A step has 4.19M tokens, not 4.00M: 512 sequences divide among ranks." in shown(global_batch="4M-tokens")
    assert "A step has" not in shown(global_batch="4.194304M-tokens")
    assert "A step has" not in shown()


def test_a_micro_batch_of_three_has_a_batch_that_it_divides():
    assert flopwise.plan("llama3-8b", gpu="h100", gpus=8, tp=8, micro_batch=3).batch % 3 == 0


def test_other_links_and_limits_are_said():
    one = shown(link="nvlink4")
    assert "One link for both, within a host and between hosts: nvlink4." in one
    assert flopwise.plan("llama3-8b", **SMALL, link="nvlink4").cluster_title == "DGX H100 with other links"
    assert flopwise.plan("llama3-8b", **SMALL, link="nvlink4,ib400").cluster_title == "DGX H100"
    assert "One link" not in shown(link="nvlink4,ib200")
    assert "The limit of 90 GB is above the GPU's 80 GB." in shown(memory_limit=90 * 10**9)
    assert "is above" not in shown(memory_limit=70 * 10**9)
    assert "Limits: datasheet. All tables: --full" in shown()


def test_days_by_both_conventions_stand_in_one_line():
    found = flopwise.plan("llama3-8b", **SMALL, tokens=15e12, mfu=0.5)
    line = f"At 50 % MFU: {found.days:.1f} days with attention's FLOPs counted; {found.rule_days:.1f} by 6·N·D alone."
    assert line in " ".join(text(plan_screen(found)).split())


def test_a_price_is_not_asked_for_again():
    assert "$128 an hour at $2 a GPU. Days, GPU-hours and money of a run: add --tokens 15T." in shown(price=2.0)
    assert "--price" not in shown(price=2.0)
    assert "--price 2.5" in shown()


@pytest.mark.slow
def test_notes_leave_it_on_one_screen():
    given = {"link": "nvlink4", "memory_limit": 90 * 10**9, "global_batch": "4M-tokens", "tokens": 15e12, "price": 2.5}
    for model, gpus in (("mixtral-8x7b", 64), ("llama3-70b", 128)):
        lines = text(plan_screen(flopwise.plan(model, gpu="h100", gpus=gpus, mfu=0.5, **given))).splitlines()
        assert len(lines) <= 25
        assert all(len(line) <= 80 for line in lines)


def test_one_token_is_no_hours():
    assert "1 token takes" in shown(tokens=1)
    assert "less than 0.01 GPU-hours" in shown(tokens=1)


def test_the_next_best_differ_by_something_that_matters(planned):
    best = planned.best
    other = {"tensor": best.layout.tensor * 2, "context": best.layout.context * 2}
    alike, different, far = slower(best, 0.001, context=2), slower(best, 0.001, **other), slower(best, 0.1, context=4)
    held = msgspec.structs.replace(best.memory, peak_bytes=2 * planned.limit_bytes)
    faster, slow = (
        msgspec.structs.replace(slower(best, share, pipeline=8), memory=held, why="does not fit")
        for share in (-0.1, 0.1)
    )
    assert same(best, alike)
    assert not same(best, different)
    assert next_best(msgspec.structs.replace(planned, others=(alike, different, far))) == [different, far]
    every = msgspec.structs.replace(planned, others=(different, far, slower(far, 0.1), slow, faster))
    assert next_best(every) == [different, far, faster]
    assert next_best(msgspec.structs.replace(planned, others=(different, far, slow))) == [different, far]


def test_the_plan_lists_what_does_not_fit_only_where_it_is_faster():
    found = flopwise.plan("llama3-70b", gpu="h100", gpus=64, tp=8)
    too_large = [one for one in found.others if one.memory.peak_bytes > found.limit_bytes]
    assert all(one.step.wall_s < found.best.step.wall_s for one in too_large)


def test_the_chart_names_its_limit_its_values_and_what_does_not_fit(planned):
    held = msgspec.structs.replace(planned.best.memory, peak_bytes=2 * planned.limit_bytes)
    too_large = msgspec.structs.replace(planned.best, memory=held)
    drawn = json.dumps(plan_chart(msgspec.structs.replace(planned, others=(too_large,))).to_dict())
    assert "limit: 80 GB" in drawn
    assert "2. does not fit: " in drawn
    assert f"{planned.best.memory.peak_bytes / 1e9:.1f} GB" in drawn
    assert drawn.count("#B00020") == 2


def test_far_apart_is_said_in_times():
    assert apart(3.84e9, 3.43e6) == "1120 times as fast"
    assert apart(1.0, 1.25) == "25 % slower"


@pytest.mark.parametrize(
    ("folder", "own", "name"),
    [
        ("model", None, "qwen3"),
        ("qwen3-32b", None, "qwen3-32b"),
        ("model", "Qwen/Qwen3-8B", "Qwen3-8B"),
        ("a", ".", "a"),
    ],
)
def test_a_config_is_named_by_what_says_most(tmp_path, folder, own, name):
    config = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 8, "vocab_size": 32_000} | ({"_name_or_path": own} if own else {})
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(config))
    assert flopwise.plan(f"hf:{tmp_path / folder / 'config.json'}", gpu="h100", gpus=8).model == name


def test_counts_are_read_with_their_letters(capsys):
    with pytest.raises(SystemExit):
        main(
            [
                "plan",
                "llama3-8b",
                "--gpu",
                "h100",
                "--gpus",
                "1K",
                "--context",
                "16K",
                "--tp",
                "8",
                "--pp",
                "1",
                "--cp",
                "1",
                "--format",
                "json",
            ]
        )
    found = json.loads(capsys.readouterr().out)
    assert (found["gpus"], found["context"]) == (1000, 16_000)


def test_h800_hosts_are_known():
    found = flopwise.plan("llama3-8b", gpu="h800", gpus=8, tp=8)
    assert found.cluster == "hgx-h800"
