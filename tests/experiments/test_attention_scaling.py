"""attention-scaling: the verdict follows the exponents and the snapshot; on the CPU memory obeys its laws exactly."""

import pytest
import torch
from made_rows import measured, timed

from flopwise.experiments.claims.attention_scaling import (
    COMPILED,
    EXPERIMENT,
    FLASH,
    NAIVE,
    SDPA,
    Setting,
    exponent,
    growths,
    matrix_bytes,
    saved_bytes,
)
from flopwise.lm.attention import attention_function
from flopwise.records.experiment import Place

GPU, CPU = Place(device="cuda:0"), Place(device="cpu")
CONTEXTS = (512, 1024, 2048, 4096)
KEPT = {NAIVE: 2, COMPILED: 2, SDPA: 1, FLASH: 1}


def made(time=2.0, kept=KEPT, found=1.0, spread=0.0, ways=tuple(KEPT)):
    """Rows whose time and memory grow with these powers; the snapshot holds `found` of the predicted bytes."""
    rows = []
    for how in ways:
        about = {"how": how, "batch": 16, "context": 4096, "head_dim": 64, "dtype": "bf16"}
        if how != COMPILED:
            predicted, keeps = matrix_bytes(16, 4096, "bf16"), how == NAIVE
            held = {"predicted_bytes": predicted, "found_bytes": int(found * predicted) if keeps else None}
            rows.append({"part": "matrix", **about, **held, "kept": 2 * keeps})
            tensor = {"op": "exp", "shape": "16 × 4096 × 4096", "tensor_dtype": "bf16", "tensor_bytes": predicted}
            rows.append({"part": "kept", **about, **tensor})
        for where, context, head_dim in (*(("context", n, 64) for n in CONTEXTS), ("head", 4096, 128)):
            ns = 1e-3 * context**time * head_dim
            clock = timed(ns, not spread, wall_low_ns=ns * (1 - spread), wall_high_ns=ns * (1 + spread))
            memory = {"saved_bytes": 10 * context ** kept[how], "peak_bytes": 40 * context ** kept[how]}
            sizes = {**about, "context": context, "head_dim": head_dim}
            rows.append({"part": where, **sizes, "device_ns": ns, **clock, **memory})
    return rows


def test_it_can_be_confirmed_refuted_and_left_open(pure):
    yes = pure(EXPERIMENT, made(), GPU)
    assert yes.word == "confirmed"
    assert "N^2.00 (naive)" in yes.why
    assert "2 of 512 MiB" in yes.why
    assert "none in that of SDPA or flash (ours)" in yes.why
    assert pure(EXPERIMENT, made(time=1.0), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made(kept=KEPT | {SDPA: 2}), GPU).word == "refuted here"
    assert pure(EXPERIMENT, made(found=2.0), GPU).word == "refuted here"  # another size than the predicted
    between = pure(EXPERIMENT, made(time=1.5), GPU)
    assert between.word == "inconclusive"  # near neither
    assert "do not fill the chip" in between.why
    assert pure(EXPERIMENT, made(time=1.0, spread=0.4), CPU).word == "inconclusive"  # too noisy to refute
    assert pure(EXPERIMENT, made(ways=(NAIVE,)), GPU).word == "inconclusive"  # nothing to hold it against
    unseen = [row for row in made() if row["part"] != "matrix"]
    assert pure(EXPERIMENT, unseen, GPU).word == "inconclusive"  # no snapshot


def test_an_exponent_is_of_the_longest_contexts():
    assert exponent({256: 7e9, 1024: 1.0, 2048: 4.0, 4096: 16.0}) == pytest.approx(2.0)
    assert exponent({256: 7e9, 1024: 1.0}) is None


def test_its_pictures_and_tables_are_of_its_rows():
    rows = EXPERIMENT.read(made())
    assert [picture.y.field for picture in EXPERIMENT.draw(rows, GPU)] == ["device_ns", "saved_bytes", "device_ns"]
    missing = {"how": COMPILED, "context": 512, "why": "no compiler"}
    tables = EXPERIMENT.tabulate(rows + EXPERIMENT.read([{"part": "missing", **missing}]), GPU)
    assert [len(table.rows) for table in tables] == [4, 3, 3, 20, 1]
    assert "peak_bytes" in tables[-2].keys
    assert tables[-1].rows == (missing,)


def test_the_same_input_saved_twice_is_counted_once_and_inputs_not_at_all():
    inputs = [torch.randn(2, 32, 16, requires_grad=True) for _ in range(3)]
    square = matrix_bytes(2, 32, "fp32")
    # two matrices, the mask, the place of each row's maximum, and the rows' sums
    assert saved_bytes(attention_function("naive", compiled_elsewhere=False), inputs) == (
        2 * square + 32 * 32 + 2 * 32 * 8 + 2 * 32 * 4
    )
    assert saved_bytes(lambda q, k, v: q * k + q * k, inputs) == 0


def test_a_quick_run_on_the_cpu(pure, monkeypatch, tmp_path):
    whole = Setting.__init__

    def small(self, bench):
        whole(self, bench)
        self.middle, self.contexts = 128, (128, 256, 512)

    monkeypatch.setattr(Setting, "__init__", small)
    threads = torch.get_num_threads()
    rows = measured(EXPERIMENT, folder=tmp_path)
    assert torch.get_num_threads() == threads
    assert {row["how"] for row in rows} == {NAIVE, SDPA}  # no GPU for ours; compiling is not quick
    place = Place(device="cpu")
    assert pure(EXPERIMENT, rows, place).why
    typed = EXPERIMENT.read(rows)
    assert not any("peak_bytes" in table.keys for table in EXPERIMENT.tabulate(typed, place))
    kept = {row.how: row.saved_exponent for row in growths(typed)}
    assert kept[NAIVE] == pytest.approx(2, abs=0.05)
    assert kept[SDPA] == pytest.approx(1, abs=0.05)
    naive, fused = (row for row in rows if row["part"] == "matrix")
    assert naive["found_bytes"] == naive["predicted_bytes"] == 128 * 128 * 4
    assert fused["kept"] == 0
