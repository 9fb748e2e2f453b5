"""Generation with a cache computes what the whole sequence computes, and its FLOPs are those that are recorded."""

from pathlib import Path

import pytest
import torch

from flopwise.api.roofline import roofline
from flopwise.errors import FlopwiseError
from flopwise.lm.generation import Generation
from flopwise.lm.transformer import Transformer
from flopwise.predict.flops import model_flops
from flopwise.predict.inference import generation_part
from flopwise.predict.machine import machine_with
from flopwise.predict.prediction import predict
from flopwise.spec.gpu import gpu
from flopwise.spec.model import preset
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import CACHED_ATTENTION, workload
from flopwise.store import StoredRun

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-2026-11" / "decode"
SPECS = {
    "gpt2": {"positions": "learned", "norm_kind": "layer", "mlp": "gelu", "max_context": 32},
    "grouped heads": {"n_kv_heads": 1},
    "normed queries": {"qk_norm": True, "tied": True},
}


@pytest.mark.parametrize("attention", ["naive", "sdpa"])
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS)
def test_prompt_then_token_give_the_logits_of_the_whole_sequence(fields, attention):
    torch.manual_seed(0)
    spec = preset("tiny").with_fields(fields)
    model = Transformer(spec, Recipe(attention=attention), 12)
    tokens = torch.randint(spec.vocab, (2, 12))
    with torch.no_grad():
        whole = model(tokens)
        generation = Generation(model, 2, 11, torch.float32)
        prompt, token = generation(tokens[:, :11]), generation(tokens[:, 11:])
        other = generation(tokens[:, :1])
    torch.testing.assert_close(prompt, whole[:, 10:11], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(token, whole[:, 11:], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(other, token)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["tiny", "llama3.2-1b"])
def test_the_formula_counts_what_is_recorded(name, phase):
    asked = workload(name, phase=phase, batch=3, context=64, precision="bf16-pure", set={"n_layers": 2})
    found = predict(asked, machine_with(gpu("h200")))
    exact = model_flops(asked.subject, 3, 64, phase)
    assert sum(op.flops for op in found.ops) in (exact.total, exact.causal)
    assert found.time is not None
    assert found.time.gpu_ns > 0


def test_a_token_reads_every_weight_and_the_whole_cache():
    asked = workload("llama3.2-1b", phase="decode", batch=8, context=512)
    part, spec = generation_part(asked), asked.subject
    cache = 2 * 8 * 512 * spec.n_layers * spec.n_kv_heads * spec.head_dim * 2
    assert part.tokens == 8
    assert part.read_bytes - cache == pytest.approx(2 * spec.parameters(), rel=0.01)


@pytest.mark.slow
def test_the_memory_of_a_step_is_that_measured_on_an_h200():
    points = [p for p in StoredRun.load(MEASURED).points if p.trial.workload.recipe.graph == "off"]
    assert {point.trial.workload.phase for point in points} == {"prefill", "decode"}
    for point in points:
        peak = max(phase.peak_bytes for phase in point.memory)
        assert predict(point.trial.workload, machine_with(gpu("h200"))).step.peak_bytes == pytest.approx(peak, rel=0.01)


def test_a_lookup_counts_what_it_finds():
    found = roofline("tiny", phase="decode", batch=2, gpu="h200")
    (lookup,) = [point for point in found.points if point.kind == "embedding/index"]
    assert lookup.flops == 2 * 64


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attention": "flash"}, "reads no cache"),
        ({"context": 1}, "is no prompt"),
        ({"set": {"max_context": 64}, "context": 64}, "with the new token"),
        ({"overlap": "on"}, "is about the optimizer"),
    ],
)
def test_what_a_step_of_generation_cannot_have_is_refused(options, why):
    with pytest.raises(FlopwiseError, match=why):
        workload("tiny", phase="decode", **options)


def test_what_it_can_have():
    for attention in CACHED_ATTENTION:
        assert workload("tiny", phase="decode", attention=attention, graph="on").generates
    with pytest.raises(FlopwiseError, match="one operation"):
        workload("op:gelu", phase="decode")
