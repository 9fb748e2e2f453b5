"""What is seen of a step: on steps whose work is known by formula, written in different ways."""

import math
import sys
from functools import partial

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flopwise.capture.build import build_step
from flopwise.capture.seen_step import watch_step
from flopwise.capture.step import Step
from flopwise.predict.flops import model_flops
from flopwise.records.run import STEP, WRITTEN_OUT, Point, Ran, Seen, SeenOptimizer
from flopwise.records.written import with_seen, written_recipe
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import workload

CPU = torch.device("cpu")
BATCH, CONTEXT, WIDTH, HEADS, LAYERS, VOCAB = 2, 64, 32, 4, 2, 61
TOKENS = BATCH * CONTEXT
MATMUL_WEIGHTS = LAYERS * 12 * WIDTH * WIDTH + VOCAB * WIDTH
USEFUL = 6 * TOKENS * MATMUL_WEIGHTS + 12 * LAYERS * BATCH * CONTEXT * CONTEXT * WIDTH  # and attention's squares


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """What other tests of this process have compiled is not the step's."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.utils.counters.clear()


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.qkv, self.out, self.kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "math":
            with sdpa_kernel(SDPBackend.MATH):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), -math.inf)
            if self.kind == "softmax":
                weights = scores.float().softmax(-1).to(v.dtype)
            else:
                weights = (scores - scores.amax(-1, keepdim=True)).exp()
                weights = weights / weights.sum(-1, keepdim=True)
            y = F.dropout(weights, 0.1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention, self.norms = Attention(kind), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """More positions than words, as of letters: the table of positions has more rows."""

    def __init__(self, kind="sdpa", again="", indexed=False):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2 * VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(LAYERS))
        self.head, self.again, self.indexed = nn.Linear(WIDTH, VOCAB, bias=False), again, indexed

    def forward(self, tokens):
        x = self.words.weight[tokens] if self.indexed else self.words(tokens)
        x = x + self.positions(torch.arange(CONTEXT))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.again == "reentrant") if self.again else block(x)
        return self.head(x)


def train(model, loss_of, optimizer=torch.optim.AdamW, passes=1, clip=False, closure=False):
    made = optimizer(model.parameters(), lr=1e-3)

    def backward():
        loss = loss_of()
        loss.backward()
        return loss

    def step():
        if closure:
            made.step(backward)
        else:
            for _ in range(passes):
                backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            made.step()
        made.zero_grad()

    return step


def gpt(autocast=None, dtype=torch.float32, compiled="", training=None, **options):
    torch.manual_seed(0)
    model = Gpt(**options).to(dtype)
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT))
    run = torch.compile(model, backend="aot_eager") if compiled == "wrapped" else model
    if compiled == "in place":
        model.compile(backend="aot_eager")
    for block in model.blocks if compiled == "blocks" else ():
        block.compile(backend="aot_eager")

    def loss():
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return F.cross_entropy(run(tokens).flatten(0, 1).float(), tokens.flatten())

    if compiled == "function":
        loss = torch.compile(loss, backend="aot_eager")
    return train(model, loss, **(training or {})), model


def watched(step, model=None, warm=1):
    for _ in range(warm):
        step()
    return watch_step(Step({STEP: step}, ran=lambda: Ran(device="cpu"), trained=model), CPU)


def written(seen, weights="fp32"):
    return written_recipe(Ran(device="cpu", weights=weights, seen=seen), Recipe(), Recipe())


WAYS = {
    "sdpa": {},
    "math": {"kind": "math"},
    "softmax": {"kind": "softmax"},
    "softmax by hand": {"kind": "exp"},
    "bf16 inside": {"autocast": torch.bfloat16, "kind": "softmax"},
    "bf16 weights": {"dtype": torch.bfloat16},
    "checkpointed": {"again": "yes"},
    "checkpointed, reentrant": {"again": "reentrant"},
    "closure": {"training": {"closure": True}},
    "fused": {"training": {"optimizer": partial(torch.optim.AdamW, fused=True)}},
    "indexed table": {"indexed": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_useful_flops_and_tokens_are_the_models_however_it_is_written(way):
    step, model = gpt(**WAYS[way])
    seen = watched(step, model)
    assert (seen.useful_flops, seen.tokens, seen.problem) == (USEFUL, TOKENS, "")
    assert seen.parameters == sum(p.numel() for p in model.parameters())
    assert sum(seen.flops.values()) >= seen.useful_flops + seen.recomputed_flops
    assert bool(seen.recomputed_flops) == ("checkpointed" in way)


LEVERS = (
    {"attention": "naive"},
    {"attention": "flash", "loss": "fused", "norm": "triton", "optimizer": "flopwise", "checkpoint": 2},
    {"loss": "chunked", "projections": "fused", "precision": "bf16"},
    {"overlap": "on", "precision": "bf16-pure", "checkpoint": 1},
    {"phase": "forward"},
)


@pytest.mark.parametrize("levers", LEVERS, ids=str)
def test_of_a_preset_the_formulas_flops_are_seen_whatever_the_levers(levers):
    asked = workload("tiny", batch=2, context=32, **levers)
    step = build_step(asked, CPU)
    seen = watch_step(step, CPU)
    assert seen.useful_flops == model_flops(asked.subject, 2, 32, asked.phase).total
    assert (seen.tokens, seen.dtype) == (64, asked.recipe.compute)
    assert {one.form for one in seen.optimizers} == ({asked.recipe.optimizer} if asked.phase == "train" else set())


def test_the_parameters_are_those_that_the_step_computes_with():
    """Not those of a model that only stands in the same file, nor of an average that is kept of them."""
    step, model = gpt()
    average, unrelated, teacher = Gpt(), nn.Linear(300, 300), nn.Linear(WIDTH, 5).to(torch.bfloat16)

    def both():
        step()
        teacher(torch.ones(1, WIDTH, dtype=torch.bfloat16))
        with torch.no_grad():
            for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, 0.1)

    built = [model, average, unrelated, teacher]
    weights = [p for one in built for p in one.parameters()]
    found = Step({STEP: both}, ran=lambda: Ran(device="cpu"), trained=unrelated, weights=lambda: weights)
    seen = watch_step(found, CPU)
    assert seen.parameters == sum(p.numel() for one in (model, teacher) for p in one.parameters())
    assert seen.weights == "fp32"  # of most of them
    ran = with_seen(Ran(device="cpu", parameters=90_300), seen, workload("py:a:b"))
    assert (ran.parameters, ran.weights) == (seen.parameters, "fp32")


def test_what_is_computed_again_is_counted_as_done():
    once, again = (watched(*gpt(again=again)) for again in ("", "reentrant"))
    forward = 2 * TOKENS * LAYERS * 12 * WIDTH * WIDTH + 4 * LAYERS * BATCH * CONTEXT * CONTEXT * WIDTH
    assert again.recomputed_flops == forward
    assert sum(again.flops.values()) - sum(once.flops.values()) == forward
    assert (once.checkpoints, again.checkpoints) == (0, LAYERS)


@pytest.mark.parametrize(
    ("kind", "attention"), [("sdpa", "flash"), ("math", "math"), ("softmax", WRITTEN_OUT), ("exp", WRITTEN_OUT)]
)
def test_the_attention_that_ran_is_named(kind, attention):
    seen = watched(*gpt(kind=kind))
    assert seen.attention == (attention,)
    assert written(seen).attention == ("naive" if attention == WRITTEN_OUT else "sdpa")


def test_autocast_inside_the_step_is_seen_and_is_the_recipe_as_written():
    step, model = gpt(autocast=torch.bfloat16, kind="softmax")
    seen = watched(step, model)
    assert (set(seen.flops), seen.autocast) == ({"bf16"}, "bf16")
    found = with_seen(Ran(device="cpu", weights="fp32"), seen, workload("py:steps:trains"))
    assert (found.compute, found.attention, found.optimizer) == ("bf16", WRITTEN_OUT, "AdamW loop")
    assert found.written == Recipe(precision="bf16", attention="naive", optimizer="adamw-loop")


def test_weights_in_bf16_are_bf16_pure_unless_the_optimizer_updates_copies_in_fp32():
    seen = watched(*gpt(dtype=torch.bfloat16))
    assert written(seen, "bf16").precision == "bf16-pure"
    masters = msgspec.structs.replace(seen, optimizers=(SeenOptimizer(name="AdamW", by_torch=True, updates="fp32"),))
    assert written(masters, "bf16").precision == "bf16-master"


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize(
    ("optimizer", "name", "form", "lever"),
    [
        (partial(torch.optim.AdamW, fused=True), "AdamW", "fused", "fused"),
        (partial(torch.optim.Adam, foreach=True), "Adam", "foreach", "foreach"),
        (partial(torch.optim.SGD, foreach=False), "SGD", "loop", "adamw-loop"),
        (partial(torch.optim.RMSprop, foreach=False), "RMSprop", "loop", "foreach"),  # which the lever does not know
        (Plain, "Plain", "", "foreach"),
    ],
)
def test_an_optimizers_form_is_read_from_its_ops(optimizer, name, form, lever):
    model = nn.Linear(4, 4)
    seen = watched(train(model, lambda: model(torch.ones(2, 4)).sum(), optimizer), model)
    assert [(one.name, one.form) for one in seen.optimizers] == [(name, form)]
    assert written(seen).optimizer == lever


def test_an_optimizer_that_multiplies_matrices_adds_nothing_to_the_models_flops():
    model = nn.Linear(16, 16, bias=False)
    seen = watched(train(model, lambda: model(torch.ones(2, 16)).sum(), torch.optim.Muon), model)
    assert (seen.flops, seen.useful_flops) == ({"fp32": 2 * 2 * 2 * 16 * 16}, 2 * 2 * 2 * 16 * 16)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("compiled", "lever"),
    [("wrapped", "default"), ("in place", "default"), ("blocks", "blocks"), ("function", "default")],
)
def test_compiled_code_is_watched_op_by_op_and_stays_compiled(compiled, lever):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step, model = gpt(compiled=compiled)
    seen = watched(step, model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (seen.useful_flops, written(seen).compile) == (USEFUL, lever)
    step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


def test_a_small_compiled_function_is_a_part():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step, model = gpt()
    scaled = torch.compile(lambda x: x * 2, backend="eager")
    seen = watched(lambda: (scaled(torch.ones(2)), step()), model)
    assert (seen.compiled, written(seen).compile) == ("parts", "off")


def test_gradients_that_are_summed_and_clipped():
    seen = watched(*gpt(training={"passes": 3, "clip": True}))
    assert (seen.backwards, seen.updates, seen.clips) == (3, 1, True)
    assert (seen.useful_flops, seen.tokens) == (3 * USEFUL, 3 * TOKENS)
    once = watched(*gpt())
    assert (once.backwards, once.updates, once.clips) == (1, 1, False)


def test_a_step_that_differentiates_its_gradients_computes_nothing_again():
    first, second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 1))
    x, model = torch.randn(4, 8, requires_grad=True), nn.ParameterList([first, second])

    def loss():
        (force,) = torch.autograd.grad(((x @ first).tanh() @ second).sum(), x, create_graph=True)
        return force.square().sum()

    seen = watched(train(model, loss), model)
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    assert (seen.useful_flops, seen.recomputed_flops) == (counter.get_total_flops(), 0)
    assert (seen.backwards, seen.updates) == (1, 1)


def test_labels_and_images_are_no_tokens():
    classes, patches = nn.Embedding(10, 8), nn.Linear(8, 8)
    labels, images = torch.zeros(4, dtype=torch.long), torch.randn(4, 16, 8)
    assert watched(lambda: patches(images + classes(labels)[:, None])).tokens == 0


def test_sequences_in_one_line_are_tokens():
    words, head = nn.Embedding(10, 8), nn.Linear(8, 8)
    assert watched(lambda: head(words(torch.arange(48) % 10))).tokens == 48


def test_a_convolution_has_flops_in_its_dtype():
    model, x = nn.Conv2d(3, 8, 3, bias=False), torch.randn(2, 3, 10, 10)
    with torch.no_grad():
        seen = watched(lambda: model(x), model)
    assert seen.flops == {"fp32": 2 * 2 * 8 * 8 * 8 * 3 * 9}


def test_inference_mode_shows_its_ops():
    model = Gpt().eval()
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.long)

    @torch.inference_mode()
    def step():
        model(tokens)

    seen = watched(step, model)
    assert (seen.useful_flops, seen.tokens, seen.attention) == (USEFUL // 3, TOKENS, ("flash",))


def test_a_step_that_fails_when_watched_says_why_and_nothing_else():
    runs = []

    def step():
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("not\ntwice")

    seen = watched(step)
    assert seen == Seen(problem="ValueError: not twice")
    ran = with_seen(Ran(device="cpu", weights="fp32", optimizer="AdamW loop"), seen, workload("py:steps:trains"))
    assert (ran.optimizer, ran.written) == ("AdamW loop", None)
    assert torch.cuda.CUDAGraph.replay.__name__ == "replay"  # everything is as before
    assert not hasattr(torch.autograd.backward, "__wrapped__")


def test_replays_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    seen = watched(lambda: torch.cuda.CUDAGraph.replay(object()))
    assert (seen.replays, written(seen).graph) == (1, "on")


def test_a_lever_that_was_put_onto_the_step_says_nothing_of_its_code():
    ran = Ran(device="cpu", weights="fp32", seen=Seen(flops={"bf16": 1}, attention=(WRITTEN_OUT,)))
    found = written_recipe(ran, Recipe(precision="bf16"), Recipe())
    assert found == Recipe(attention="naive")


def test_no_recipe_is_made_that_is_not_allowed():
    seen = Seen(flops={"fp16": 1}, replays=2)
    assert written(seen) == Recipe(precision="fp16")


def test_a_bench_of_a_users_step_has_what_was_seen(worker, own_step):
    point = worker.run(own_step("transformer_in_one", warmup=2))
    assert point.ran.seen.tokens == 64
    assert point.ran.seen.useful_flops == 6 * 64 * (4 * 4 * 32 * 32 + 50 * 32) + 12 * 4 * 2 * 32 * 32 * 32
    assert point.ran.written == Recipe(optimizer="adamw-loop")
    assert [times.phase for times in point.phases] == ["step", "forward", "backward", "optimizer"]
    decoded = msgspec.json.decode(msgspec.json.encode(point), type=Point)
    assert decoded.ran == point.ran
    unwatched = worker.run(own_step("transformer_in_one"), watch=False)
    assert unwatched.ran.seen is None
    assert [times.phase for times in unwatched.phases] == ["step"]  # its second run was no warm-up
