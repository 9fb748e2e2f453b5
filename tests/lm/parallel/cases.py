"""Small trainings, each with something that data parallelism can get wrong; run by one process, or by several together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flopwise.lm.loss import loss_chunked, loss_full
from flopwise.lm.parallel import DDP, FSDP, BucketedDDP, FlatDDP, NaiveDDP, ShardedOptimizer
from flopwise.lm.parallel.fsdp import sharded_together
from flopwise.lm.transformer import Transformer
from flopwise.spec.recipe import Recipe
from lm.reference import GPT2_LIKE, QWEN3_LIKE, TINY

STEPS = 3
ROWS = 12  # of the batch of all ranks: divides by 2 and 3, and so do the halves of what a rank gets

WAYS: dict[str, Callable[..., nn.Module]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": DDP,
    "buckets": partial(BucketedDDP, bucket_mb=0.0002),
    "fsdp": FSDP,
    "sharded optimizer": DDP,
}


class Toy(nn.Module):
    """A bias and a parameter that are not trained; a buffer; none of the sizes divides by three."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(7, 5)
        self.fc1.bias.requires_grad = False
        self.norm = nn.LayerNorm(5)
        self.fc2 = nn.Linear(5, 11, bias=False)
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.scale: Tensor
        self.register_buffer("scale", torch.randn(()))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.fc2(self.norm(self.fc1(x)).relu()) * self.scale + self.fixed.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(*size) for size in ((7, 5), (5, 9), (9, 5), (5, 9)))
        self.fc4.weight = self.fc2.weight

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.fc4(self.fc3(self.fc2(self.fc1(x)).tanh()).tanh())


class Choosy(nn.Module):
    """One layer is used for the batch's first row alone, and so by one rank; one in every second step; one never."""

    def __init__(self) -> None:
        super().__init__()
        block = {name: nn.Linear(7, 5) for name in ("always", "one_row", "never")}
        self.blocks = nn.ModuleList([nn.ModuleDict(block)])
        self.sometimes = nn.Linear(5, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        block = self.blocks[0]
        y = block["always"](x)
        first = x[:, 0] > 10
        if first.any():
            y = y + torch.where(first[:, None], block["one_row"](x), 0)
        return self.out(self.sometimes(y) if step % 2 else y)


class Frozen(nn.Module):
    """All of a layer is not trained, and gradients pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.layers(x)


class Squared(nn.Module):
    """The model's loss: mean over the rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.model(x, step).to(torch.promote_types(x.dtype, torch.float32)).square().mean()


class LanguageModel(nn.Module):
    """Its loss; `chunked` reads the head's weight from outside of the head."""

    def __init__(self, model: Transformer, chunked: bool = False) -> None:
        super().__init__()
        self.model, self.chunked = model, chunked

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.chunked:
            return loss_chunked(self.model.hidden(inputs), self.model.head_weight, targets, 16)
        return loss_full(self.model(inputs), targets)


def toy(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    return Squared(kind()).to(dtype)


def transformer(spec: Any, chunked: bool = False, **recipe: Any) -> nn.Module:
    return LanguageModel(Transformer(spec, Recipe(**recipe), 16), chunked)


def numbers(step: int) -> Tensor:
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x[0, 0] = 20
    return x


def tokens(vocab: int, step: int) -> Tensor:
    return torch.randint(0, vocab, (ROWS, 9), generator=torch.Generator().manual_seed(step))


@dataclass(frozen=True)
class Case:
    """`micro`: how the two halves of a rank's batch are accumulated, if they are; `groups`: a second one is added later."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Tensor] = numbers
    adamw: bool = False
    groups: bool = False
    resume: bool = False
    micro: str = ""
    dtype: torch.dtype | None = None
    checkpoint: int = 0  # one process goes without
    ways: tuple[str, ...] = tuple(WAYS)


FEW = ("buckets", "fsdp")
BF16 = {"dtype": torch.bfloat16, "ways": ("fsdp",)}
CASES = {
    "not trained": Case(partial(toy, Toy)),
    "tied": Case(partial(toy, Tied), adamw=True),
    "not used": Case(partial(toy, Choosy), adamw=True),
    "frozen layer": Case(partial(toy, Frozen), adamw=True),
    "groups": Case(partial(toy, Toy), adamw=True, groups=True),
    "resumed": Case(partial(toy, Tied), adamw=True, resume=True, ways=("sharded optimizer",)),
    "accumulated": Case(partial(toy, Toy), micro="finish at the end"),
    "accumulated, finished each time": Case(partial(toy, Tied), micro="finish each"),
    "accumulated, not sent": Case(
        partial(toy, Choosy), micro="no_sync", ways=("overlapped", "buckets", "sharded optimizer")
    ),
    "tiny": Case(partial(transformer, TINY), partial(tokens, TINY.vocab), adamw=True),
    "learned positions, tied head": Case(partial(transformer, GPT2_LIKE), partial(tokens, 61), True, ways=FEW),
    "checkpointed": Case(partial(transformer, QWEN3_LIKE), partial(tokens, 61), True, checkpoint=1, ways=FEW),
    "head read by the loss": Case(partial(transformer, QWEN3_LIKE, chunked=True), partial(tokens, 61), True, ways=FEW),
    "bf16, tied, checkpointed": Case(partial(transformer, QWEN3_LIKE), partial(tokens, 61), True, checkpoint=1, **BF16),
    "bf16, numbers in": Case(partial(toy, Toy, torch.float32), **BF16),
}


def alone(name: str, ranks: int) -> dict[str, Tensor]:
    """The weights that one process ends with."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model()
    optimizer = Optimizing(case, list(model.parameters()), "")
    for step in range(STEPS):
        optimizer.zero_grad(step)
        if case.dtype is None:
            model(case.batch(step), step).backward()
        else:  # rounded as every rank rounds: its own part's gradients
            for part in case.batch(step).chunk(ranks):
                in_dtype(model, case.dtype, part, step).backward()
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / ranks
        optimizer.step()
    return model.state_dict()


def in_dtype(model: nn.Module, dtype: torch.dtype, x: Tensor, step: int) -> Tensor:
    """The loss with all sharded weights and the input in a dtype; their gradients are added up in the weights' own."""
    narrow = {p for group in sharded_together(model) for p in group}
    named = model.named_parameters(remove_duplicate=False)  # a tied weight is cast for each use
    weights = {name: p.to(dtype) if p in narrow else p for name, p in named}
    loss: Tensor = functional_call(
        model, weights, (x.to(dtype) if x.is_floating_point() else x, step), tie_weights=False
    )
    return loss


def together(name: str, way: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """The weights that this rank ends with, whole. They begin as other weights than those of rank 0."""
    case = CASES[name]
    torch.manual_seed(rank)
    options = {} if case.dtype is None else {"compute_dtype": case.dtype}
    checkpoint = {"checkpoint": case.checkpoint} if case.checkpoint else {}
    wrap: Any = WAYS[way](case.model(**checkpoint), **options)
    optimizer = Optimizing(case, list(wrap.parameters()), way)
    for step in range(STEPS):
        optimizer.zero_grad(step)
        mine = case.batch(step).chunk(ranks)[rank]
        for last, loss in losses(case, wrap, mine, step):
            if case.micro == "no_sync" and not last:
                with wrap.no_sync():
                    loss.backward()
                continue
            loss.backward()
            if last or case.micro == "finish each":
                wrap.finish_gradient_synchronization()
        optimizer.step()
    return wrap.full_state_dict() if isinstance(wrap, FSDP) else wrap.module.state_dict()


def losses(case: Case, wrap: nn.Module, mine: Tensor, step: int) -> Iterator[tuple[bool, Tensor]]:
    halves = mine.chunk(2) if case.micro else (mine,)
    for number, half in enumerate(halves, start=1):
        yield number == len(halves), wrap(half, step) / len(halves)


class Optimizing:
    """The case's optimizer over the parameters; all with a learning rate that changes."""

    def __init__(self, case: Case, params: list[nn.Parameter], way: str) -> None:
        self.case, self.way = case, way
        late = len(params) // 2 if case.groups else len(params)
        self.optimizer = self.make(params[:late])
        self.later = [{"params": params[late:], "weight_decay": 0.0}] if case.groups else []
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)

    def make(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        cls: Any = torch.optim.AdamW if self.case.adamw else torch.optim.SGD
        options = {"lr": 0.02, "weight_decay": 0.3, **({"eps": 1e-3} if self.case.adamw else {"momentum": 0.5})}
        return ShardedOptimizer(params, cls, **options) if self.way == "sharded optimizer" else cls(params, **options)

    def zero_grad(self, step: int) -> None:
        if step == 2 and self.later:
            self.optimizer.add_param_group(self.later.pop())
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)
        if step == 2 and self.case.resume and self.way:
            saved = self.optimizer.state_dict()
            self.optimizer = self.make(self.optimizer.param_groups[0]["params"])
            self.optimizer.load_state_dict(saved)
            self.schedule.optimizer = self.optimizer
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()
