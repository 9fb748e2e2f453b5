"""`flopwise account` as a user meets it."""

import csv
import io
import json
import subprocess
import sys

import msgspec
import pytest

import flopwise
from flopwise.cli.main import main
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.shapes import losses
from flopwise.records.ceilings import MEASURED
from flopwise.spec.gpu import gpu
from flopwise.spec.model import preset
from flopwise.spec.workload import workload
from flopwise.store.ceilings import save_ceilings

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["account", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def read(capsys, *words):
    code, out, err = run(capsys, *words, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def test_the_table_names_the_parts(capsys):
    code, out, _ = run(capsys, "tiny", "--gpu", "h100,h200", "--tokens", "15T", "--gpus", "8", "--inference", "--full")
    assert code == 0
    for word in ("Work by module", "Memory by owner", "H200 SXM 141 GB", "largest batch", "Training", "KV cache", "█"):
        assert word in out, word


def test_a_name_that_states_another_size_is_told(capsys):
    assert "'2.7B' has 3.407B parameters" in run(capsys, "2.7B", "--phase", "forward")[1]
    assert "parameters (" not in run(capsys, "small", "--phase", "forward")[1]


def test_the_json_is_stable_and_adds_up(capsys):
    told = read(capsys, "tiny", "--gpu", "h100", "--measured", "24ms")
    assert told["schema"] == "flopwise.account/1"
    assert told["obtained"] == "predicted"
    assert (
        told["parameters"] == preset("tiny").parameters() == sum(m["parameters"] for m in told["parameters_by_module"])
    )
    for moment in told["memory"]["moments"]:
        assert sum(moment["owners"].values()) == moment["total_bytes"]
    assert sum(row["moved_bytes"] for row in told["work"]) == told["total"]["moved_bytes"]
    (one,) = told["gpus"]
    assert one["name"] == "h100"
    assert one["mfu_measured"] == pytest.approx(told["flops"]["total"] / (0.024 * one["peaks"]["fp32"]))


def test_the_lectures_training_run(capsys):
    told = read(
        capsys,
        "llama3-70b",
        "--batch",
        "1",
        "--precision",
        "bf16",
        "--gpu",
        "h100",
        "--gpus",
        "1024",
        "--tokens",
        "15T",
    )
    by_rule, counted = told["gpus"][0]["training"]
    assert by_rule["days"] == pytest.approx(143.9 * told["parameters"] / 70e9, rel=0.001)
    assert counted["days"] != by_rule["days"]
    assert told["gpus"][0]["fits"] is False
    assert told["gpus"][0]["largest_batch"] == 0


@pytest.mark.slow
def test_eight_bit_states_leave_room_for_more(capsys):
    full, eight = (read(capsys, "small", "--gpu", "l4", "--optimizer-bits", bits)["gpus"][0] for bits in ("32", "8"))
    assert eight["largest_batch"] > full["largest_batch"]
    assert eight["largest_model"] > full["largest_model"]


def test_inference_is_a_forward_pass(capsys):
    told = read(
        capsys, "llama3-8b", "--decode", "--precision", "bf16", "--gpu", "h100", "--context", "8192", "--batch", "1"
    )
    assert told["workload"]["phase"] == "forward"
    assert told["inference"]["kv_cache_bytes"] == 2**30
    assert [part["bound"] for part in told["gpus"][0]["inference"]] == ["compute", "bandwidth"]


def test_a_config_file_is_a_model(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    told = read(capsys, f"hf:{path}")
    assert told["parameters"] == 2 * (256 * (2 * 256 + 2 * 128) + 3 * 256 * 512 + 2 * 256) + 256 + 2 * 256_000
    path.write_text(json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}))
    code, _, err = run(capsys, f"hf:{path}")
    assert code == 2
    assert "has no field hidden_size" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny", "--gpu", "h10"), "there is no GPU 'h10'"),
        (("tiny", "--tokens", "15T"), "can be predicted only for a GPU"),
        (("tiny", "--measured", "24ms"), "can be predicted only for a GPU"),
        (("tiny", "--gpu", "h100", "--measured", "24"), "'24' is not a time"),
        (("tiny", "--gpu", "h100", "--tokens", "many"), "'many' is not a count"),
        (("tiny", "--gpu", "h100", "--tokens", "1B", "--mfu", "200%"), "'200%' is not a share"),
        (("tiny", "--gpu", "h100", "--tokens", "1B", "--mfu", "50"), "'50' is not a share"),
        (("tiny", "--gpu", ""), "names no GPU"),
        (("tiny", "--gpu", ",,"), "names no GPU"),
        (("tiny", "--attention", "sdpa-flash"), "attention = 'sdpa-flash' cannot run fp32 with head_dim 16"),
        (("tiny", "--attention", "sdpa-cudnn", "--precision", "tf32"), "attention = 'sdpa-cudnn' cannot run tf32"),
        (("tiny", "--attention", "sdpa-cudnn", "--precision", "bf16", "--set", "head_dim=136"), "with head_dim 136"),
        (("tiny", "--gpu", "h100", "--tokens", "1B", "--gpus", "0"), "gpus = 0 is not allowed"),
        (("tiny", "--optimizer-bits", "4"), "optimizer_bits = 4 is not allowed"),
        (("smal",), "no model preset 'smal'"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 2
    assert "hint: " in err


def test_csv_and_markdown(capsys):
    code, out, _ = run(capsys, "tiny", "--format", "csv")
    assert code == 0
    title, _, first_table = out.partition("\r\n")
    assert title.startswith("# Account of tiny")
    first = next(csv.DictReader(io.StringIO(first_table)))
    assert int(first["parameters"]) == preset("tiny").parameters()
    assert "| module |" in run(capsys, "tiny", "--format", "markdown")[1]


def test_what_the_cpu_can_do_is_not_specified(capsys):
    (one,) = read(capsys, "tiny", "--gpu", "cpu")["gpus"]
    assert one["fits"] is one["limit"] is one["largest_batch"] is None


def test_compiled_steps_are_said_to_be_counted_as_eager(capsys):
    assert any("compile" in note for note in read(capsys, "tiny", "--compile", "default")["notes"])


def test_the_api_has_the_same_verb():
    assert flopwise.account("tiny", gpu="h200").gpus[0].gpu.name == "h200"


def test_it_needs_no_torch():
    code = "import sys, flopwise; flopwise.account('tiny', gpu='h100'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_inference_fits_by_its_weights_and_its_cache(capsys):
    """A past bug: weights in fp32 and their copies were counted, and the cache was not."""
    words = ("llama3-70b", "--inference", "--precision", "bf16", "--gpu", "mi300x", "--context", "4096", "--batch", "1")
    told = read(capsys, *words)
    (one,) = told["gpus"]
    weights, token = told["inference"]["weights_bytes"], told["inference"]["kv_cache_bytes_per_token"]
    assert one["fits"]
    assert weights <= one["peak_bytes"] < 1.1 * weights
    assert 0 < one["largest_batch"] <= (192 * 10**9 - weights) // token // 4096


def test_the_largest_batch_of_inference_is_one_that_fits(capsys):
    """A past bug: it counted weights and cache alone, and 'fits' the prompt's activations, too."""
    words = ("llama3-8b", "--inference", "--precision", "bf16", "--gpu", "h100", "--context", "8192", "--batch")
    largest = read(capsys, *words, "1")["gpus"][0]["largest_batch"]
    assert largest > 1
    fits = [read(capsys, *words, str(batch))["gpus"][0]["fits"] for batch in (largest, largest + 1)]
    assert fits == [True, False]


def test_a_number_of_gpus_below_one_is_refused(capsys):
    code, _, err = run(capsys, "small", "--gpu", "h100", "--gpus", "-5")
    assert (code, "gpus = -5" in err) == (2, True)


def test_a_tower_of_layers_is_refused(capsys):
    code, _, err = run(capsys, "tiny", "--set", "n_layers=100000")
    assert (code, "too deep" in err) == (2, True)


def test_an_mfu_of_one_is_all_of_the_peak(capsys):
    """A past bug: a bare 1 was taken for one per cent."""
    words = ("tiny", "--gpu", "h100", "--tokens", "1B", "--mfu")
    assert [read(capsys, *words, mfu)["gpus"][0]["training"][0]["mfu"] for mfu in ("1", "50%", "0.5")] == [
        1.0,
        0.5,
        0.5,
    ]


def test_what_runs_on_the_cpu_alone_is_not_refused_for_it(capsys):
    assert read(capsys, "tiny", "--attention", "sdpa-flash", "--gpu", "cpu")["gpus"][0]["name"] == "cpu"
    assert "GPU" not in run(capsys, "tiny", "--gpu", "cpu")[1].partition("on the CPU")[2]


@pytest.mark.parametrize("lever", ["default", "blocks"])
def test_a_compiled_step_takes_no_less_than_its_least_time(capsys, lever):
    """A past bug: the least time was that of the eager operations."""
    words = ("small", "--set", "n_layers=2", "--batch", "16", "--precision", "bf16", "--attention", "naive")
    words += ("--norm", "eager", "--activation", "eager", "--optimizer", "fused", "--graph", "on", "--gpu", "h200")
    (one,) = read(capsys, *words, "--compile", lever)["gpus"]
    assert one["limit_s"] * 1e9 < one["predicted_ns"]


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_no_step_has_an_mfu_above_one_at_its_least_time(capsys, attention):
    """A past bug: whole squares over the time of half of them."""
    words = ("small", "--precision", "bf16", "--context", "65536", "--batch", "1", "--gpu", "h100")
    (one,) = read(capsys, *words, "--attention", attention)["gpus"]
    assert 0 < one["mfu_at_limit"] <= 1


def test_prefill_is_limited_by_what_the_mask_leaves(capsys):
    told = read(capsys, "llama3-8b", "--inference", "--precision", "bf16", "--gpu", "h100", "--context", "65536")
    head = 2 * 128_256 * 4096 * 4 * 65_535  # all logits but those of each prompt's last token
    assert told["inference"]["prefill"]["flops"] == told["flops"]["causal"] - head < told["flops"]["forward"]


def test_notes_of_a_config_are_told(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "some_vlm", "text_config": LLAMA | {"attention_dropout": 0.1, "odd": 1}}))
    notes = " ".join(read(capsys, f"hf:{path}")["notes"])
    for words in ("text_config alone", "attention_dropout = 0.1", "not read: odd"):
        assert words in notes


def test_a_segment_longer_than_the_model_is_noted(capsys):
    assert "checkpoint = 9 is more than the 2 layers" in " ".join(read(capsys, "tiny", "--checkpoint", "9")["notes"])


def test_the_time_to_train_is_told_in_units_that_show_it(capsys):
    out = run(capsys, "tiny", "--gpu", "h100", "--tokens", "1B", "--full")[1].partition("Training")[2]
    assert " s " in out
    assert "0.0000" not in out


def test_ceilings_in_a_file_are_refused_and_a_folder_that_is_not_there_has_none(capsys, tmp_path, monkeypatch):
    path = tmp_path / "here"
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(path))
    assert run(capsys, "tiny", "--gpu", "h100")[0] == 0
    path.write_text("{}")
    code, _, err = run(capsys, "tiny", "--gpu", "h100")
    assert code == 2
    assert "is a file, not a folder" in err


def test_measured_ceilings_name_their_file_and_their_versions(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWISE_CEILINGS", str(tmp_path))
    found = from_datasheet(gpu("h200"))
    save_ceilings(msgspec.structs.replace(found, how=MEASURED, versions={"torch": "2.11.0", "driver": ""}))
    out = run(capsys, "tiny", "--gpu", "h200", "--full")[1]
    assert f"from ceilings measured on h200 (torch 2.11.0), {tmp_path / 'h200.json'}" in out


def test_an_operation_without_a_forward_pass_is_accounted_for(capsys):
    """A past bug: KeyError 'end of forward'."""
    told = read(capsys, "op:adamw", "--set", "tensors=2,rows=8,cols=8")
    assert [m["moment"] for m in told["memory"]["moments"]] == ["start of the step", "peak"]


@pytest.mark.slow
def test_a_changed_field_reaches_transformers_own_model(tmp_path):
    """A past bug: it was in the label alone."""
    pytest.importorskip("transformers")
    from flopwise.predict.dry.run import dry_run

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    own = {"implementation": "transformers", "context": 16}
    asked = (workload(f"hf:{path}", set=changed, **own) for changed in ({}, {"n_layers": 1}))
    whole, half = (dry_run(one).parameters_bytes // 4 for one in asked)  # in fp32
    assert whole - half == 256 * (2 * 256 + 2 * 128) + 3 * 256 * 512 + 2 * 256


def test_the_lectures_question_by_size_alone(cli):
    asked = ["account", "--parameters", "70B", "--tokens", "15T", "--gpus", "1024", "--gpu", "h100", "--mfu", "0.5"]
    done = cli(*asked)
    assert done.stdout.splitlines()[1].startswith("Training takes 143.9 days: 15.0T tokens on 1,024 GPUs")
    row = json.loads(cli(*asked, "--format", "json").stdout)["training"][0]
    assert (row["flops"], round(row["days"], 1)) == (6 * 70 * 15 * 10**21, 143.9)
    of_model = cli("account", "llama3-70b", *asked[3:])
    assert of_model.stdout.splitlines()[1].startswith("Training takes 1")  # what was asked for comes first
    for words in (["account", "--parameters", "70B"], ["account", "tiny", *asked[1:]], ["account"]):
        assert cli(*words).returncode == 2


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_a_batch_of_a_million_is_answered_or_refused_in_one_line(cli, monkeypatch, loss):
    """A past bug: minutes, chunk by chunk of the loss. No prediction here goes through as many as are allowed."""
    chunks = []
    for name in ("_fused_forward", "_chunked_forward"):
        seen = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda t, rows, *rest, seen=seen: chunks.append(rows) or seen(t, rows, *rest))
    told = flopwise.account("small", batch=10**6)
    assert str(told)  # with what each lever would change
    assert not chunks
    done = cli("account", "small", "--batch", "1000000", "--loss", loss)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    assert "too many chunks" in done.stderr


def test_a_step_of_ones_own_has_the_figures_of_a_preset(cli, tmp_path):
    """Limit by its FLOPs, MFU, and what changes would save."""
    (tmp_path / "mine.py").write_text(OWN_STEP)
    shown = cli("account", f"{tmp_path / 'mine.py'}:make", "--gpu", "h200").stdout
    now, reachable, limit = (
        next(line for line in shown.splitlines() if line.startswith(f"  {name} ")) for name in FIGURES
    )
    assert all("MFU" in line for line in (now, reachable, limit))
    assert "its FLOPs at 989 TFLOP/s bf16" in limit
    assert "--precision bf16" in shown
    assert "reachable" not in cli("account", f"{tmp_path / 'mine.py'}:make", "--gpu", "cpu").stdout


FIGURES = ("now", "reachable", "limit")
OWN_STEP = """
import torch


def make(device):
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device=device) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 4096, device=device)

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step
"""


def test_a_size_alone_takes_no_lever(capsys):
    asked = ("--parameters", "70B", "--tokens", "15T", "--gpu", "h100", "--precision", "fp32")
    with pytest.raises(SystemExit):
        main(["account", *asked])
    assert "--parameters goes without --precision" in capsys.readouterr().err
