"""A training on a GPU: as a CUDA graph, accumulated and resumed, it gives the losses of the plain loop."""

import random

import pytest
import torch

import flopwise

pytest.importorskip("regex")
pytest.importorskip("tiktoken")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MODEL = {
    "set": {"d_model": 128, "d_ff": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 64, "vocab": 320},
    "batch": 8,
    "context": 64,
    "device": "cuda",
    "log_every": 1,
    "steps": 20,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from flopwise.lm import tokenizer as bpe
    from flopwise.lm.data import prepare

    draw, folder = random.Random(0), tmp_path_factory.mktemp("corpus")
    text = folder / "book.txt"
    text.write_text(" ".join(draw.choice(["loss", "fell", "rose", "again", "and", "the"]) for _ in range(40_000)))
    prepare([text], bpe.train([text], 270), folder / "tokens")
    return folder / "tokens"


def losses(found):
    return [loss for row in found.steps for loss in row.losses]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_trains_as_the_plain_loop_does(corpus, tmp_path, accumulate):
    common = MODEL | {"data": corpus, "runs": tmp_path, "accumulate": accumulate}
    plain = flopwise.train("tiny", **common)
    graph = flopwise.train("tiny", graph="on", checkpoint_every=8, **common)
    assert losses(graph) == pytest.approx(losses(plain), rel=1e-3)
    newest = max((graph.path / "checkpoints").glob("*.pt"))
    newest.unlink()  # as if it had been killed before its end
    assert losses(flopwise.train(resume=graph.path, device="cuda")) == pytest.approx(losses(graph), rel=1e-3)


def test_it_speaks_the_same_with_a_graph_and_without(corpus, tmp_path):
    found = flopwise.train("tiny", data=corpus, runs=tmp_path, **(MODEL | {"steps": 60}))
    said = [
        flopwise.generate(found.path, prompt=["the", "loss fell"], tokens=40, temperature=0.0, graph=graph).texts
        for graph in ("off", "on")
    ]
    assert said[0] == said[1]
