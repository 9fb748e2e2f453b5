"""Compiling one block for all layers: one graph, the same numbers, and names in a trace."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from flopwise.capture.build import build_step
from flopwise.capture.ranges import MODULE, named_modules
from flopwise.errors import Unsupported
from flopwise.lm.loss import loss_full
from flopwise.lm.transformer import Transformer
from flopwise.patch.blocks import blocks_of, compile_blocks
from flopwise.spec.model import preset
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload

CPU = torch.device("cpu")
DEEP = preset("tiny").with_fields({"n_layers": 8})


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()


def trained(model):
    tokens = torch.arange(48).view(2, 24)
    loss = loss_full(model(tokens), tokens)
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def model_of(**levers):
    torch.manual_seed(0)
    return Transformer(DEEP, Recipe(**levers), 24)


@pytest.mark.slow
@pytest.mark.parametrize("levers", [{"checkpoint": 3}, {"checkpoint": 1, "attention": "naive", "norm": "eager"}])
def test_eight_layers_are_one_graph_and_compute_the_same(levers):
    expected_loss, expected = trained(model_of(**levers))
    model = model_of(compile="blocks", **levers)
    compile_blocks(blocks_of([model]), dynamic=False, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        loss, gradients = trained(model)
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)


def test_an_inference_after_training_is_one_more_graph():
    model = model_of(compile="blocks")
    compile_blocks(blocks_of([model]), dynamic=False, backend="aot_eager")
    trained(model)
    with torch.no_grad():
        model(torch.arange(48).view(2, 24))
    assert counters["stats"]["unique_graphs"] == 2


def test_blocks_are_the_longest_outermost_list_of_one_class():
    class Wrapped(nn.Module):
        def __init__(self, *lists):
            super().__init__()
            self.lists = nn.ModuleDict({str(n): one for n, one in enumerate(lists)})

    def many(kind, n):
        return nn.ModuleList(kind() for _ in range(n))

    def deep():
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))

    assert len(blocks_of([Wrapped(many(deep, 3), many(nn.ReLU, 2))])) == 3  # not the nine inside each
    assert len(blocks_of([Wrapped(many(nn.ReLU, 2)), Wrapped(many(deep, 4))])) == 4
    assert blocks_of([nn.Sequential(nn.Linear(2, 2), nn.ReLU())]) == []
    one = Transformer(preset("tiny").with_fields({"n_layers": 1}), Recipe())
    assert blocks_of([one]) == [one.blocks[0]]
    assert blocks_of([nn.Sequential(model := model_of())]) == list(model.blocks)


def test_a_trace_names_compiled_blocks_and_compiles_nothing_for_it():
    model = model_of(compile="blocks")
    compile_blocks(blocks_of([model]), dynamic=False, backend="aot_eager")
    trained(model)
    with profile(activities=[ProfilerActivity.CPU]) as seen, named_modules(model):
        trained(model)
    names = {e.name.removeprefix(MODULE) for e in seen.events() if e.name.startswith(MODULE)}
    assert names == {"embedding", "rope", "norm", "head", *(f"blocks.{n}" for n in range(8))}
    assert counters["stats"]["unique_graphs"] == 1
    trained(model)  # nothing is left behind
    assert model.blocks[0]._compiled_call_impl.__name__ != "run"


def test_a_transformers_model_compiles_its_layers(tmp_path):
    pytest.importorskip("transformers")
    asked = workload(
        "hf:" + str(_llama(tmp_path)), implementation="transformers", compile="blocks", batch=1, context=16
    )
    step = build_step(asked, CPU)
    assert sum(m._compiled_call_impl is not None for m in step.model.modules()) == 3
    assert all(m._compiled_call_impl for m in step.model.inner.model.layers)


def test_a_model_without_like_blocks_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("flopwise.capture.model_step.blocks_of", lambda roots: [])
    with pytest.raises(Unsupported, match="compile = 'blocks' found no list of blocks of one class in tiny"):
        build_step(workload("tiny", compile="blocks"), CPU)


@pytest.mark.slow
def test_the_compiled_step_runs_and_has_the_eager_loss():
    losses = []
    for lever in ("off", "blocks"):
        step = build_step(workload("tiny", compile=lever, batch=2, context=16), CPU)
        for _ in range(2):
            for phase in step.phases.values():
                phase()
        losses.append(step.ran().loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def _llama(folder):
    path = folder / "config.json"
    path.write_text(
        '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, '
        '"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}'
    )
    return path
