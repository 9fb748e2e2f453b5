"""A language model's step that several ranks share: PyTorch's ways, and our own that are written to be read.

Every rank builds the same model from the same seed and draws the same batch; then each keeps its part. So all ways give what one
process gives, up to rounding.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from flopwise.capture.model_step import ModelStep, model_step
from flopwise.capture.step import Step
from flopwise.lm.optimizer import BETAS, WEIGHT_DECAY, make_optimizer
from flopwise.lm.precision import autocast
from flopwise.lm.ranks import Ranks, ranks_here
from flopwise.lm.transformer import Attention, Block, Transformer
from flopwise.records.run import Ran
from flopwise.spec.parallel import pipeline_parts
from flopwise.spec.recipe import TENSOR_RANKS
from flopwise.spec.workload import Workload

BUCKET_MB = 25.0  # of our own bucketed DDP; PyTorch's has the same


class ParallelStep(ModelStep):
    """A step of which this rank does its part."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.ranks = ranks_here()
        self.finish: Callable[[], object] = lambda: None  # after the backward pass: gradients are exchanged
        super().__init__(workload, device)

    def share(self) -> None:
        way, recipe = self.recipe.parallel, self.recipe
        self._take_part(self.ranks.rank * recipe.data_ranks // self.ranks.world, recipe.data_ranks)
        if way in ("ddp", "zero1"):
            ids = [self.device] if self.device.type == "cuda" else None
            self._call(DistributedDataParallel(self._called(), device_ids=ids, gradient_as_bucket_view=True))
        elif way.startswith("own-"):
            self._wrap_our_own(way)
        else:
            model = cast(Transformer, self.model)
            mesh = _mesh(way, self.ranks, self.device)
            if "tp" in way:
                _share_matmuls(model, mesh["tensor"])
            if "fsdp2" in way:
                _shard(model, mesh["data"], torch.bfloat16 if recipe.precision == "bf16" else None)
            self._call(model)

    def _take_part(self, number: int, parts: int) -> None:
        size = len(self.tokens) // parts
        mine = slice(number * size, (number + 1) * size)
        self.tokens, self.targets = self.tokens[mine].clone(), self.targets[mine].clone()

    def _called(self) -> nn.Module:
        """What a wrapper calls: logits, or what the head sees where the loss computes them."""
        model = cast(Transformer, self.model)
        return _Called(model, model.forward if self.recipe.loss == "full" else model.hidden)

    def _call(self, module: nn.Module) -> None:
        self.logits_of = self.hidden_of = module

    def _wrap_our_own(self, way: str) -> None:
        from flopwise.lm import parallel

        module = self._called()
        if way == "own-fsdp":
            compute = torch.bfloat16 if self.recipe.precision == "bf16" else None
            wrapped: Any = parallel.FSDP(module, compute_dtype=compute)
        elif way == "own-ddp-bucketed":
            wrapped = parallel.BucketedDDP(module, BUCKET_MB)
        else:
            kinds = {"own-ddp-naive": parallel.NaiveDDP, "own-ddp-flat": parallel.FlatDDP}
            wrapped = kinds.get(way, parallel.DDP)(module)
        self.finish = wrapped.finish_gradient_synchronization
        self._call(wrapped)

    def make_optimizer(self, parameters: list[nn.Parameter], rate: float | Tensor) -> torch.optim.Optimizer:
        way, form = self.recipe.parallel, {self.recipe.optimizer: True}
        options: dict[str, Any] = {"betas": BETAS, "weight_decay": WEIGHT_DECAY}
        options |= form if self.recipe.optimizer in ("foreach", "fused") else {"foreach": False}
        if way == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=rate, **options)
        if way == "own-zero1":
            from flopwise.lm import parallel

            return parallel.ShardedOptimizer(parameters, torch.optim.AdamW, lr=rate, **options)
        if way in ("tp", "fsdp2+tp"):  # one update is of tensors of one mesh
            return torch.optim.AdamW(_by_mesh(parameters), rate, **options)
        return make_optimizer(parameters, self.recipe, rate, graph=False)

    def backward(self) -> None:
        super().backward()
        self.finish()

    def ran(self) -> Ran:
        return _ran_together(super().ran(), self.workload, self.ranks)


class PipelineStep(ModelStep):
    """The blocks in as many stages as ranks; parts of the batch go through them one after the other (1F1B)."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.ranks = ranks_here()
        super().__init__(workload, device)

    def share(self) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        first, last = self.ranks.rank == 0, self.ranks.rank == self.ranks.world - 1
        stage = _Stage(cast(Transformer, self.model), self.ranks)
        self.model = cast(Any, stage)
        made = PipelineStage(stage, self.ranks.rank, self.ranks.world, self.device)
        self.first, self.last = first, last
        parts = pipeline_parts(len(self.tokens), self.ranks.world)
        self.schedule = Schedule1F1B(made, parts, loss_fn=lambda output, target: self.loss_of(output, target))

    def phases(self) -> dict[str, Callable[[], object]]:
        each: dict[str, Callable[[], object]] = {"backward": self.through}
        return each | ({"optimizer": self.update} if self.optimizers else {})

    def through(self) -> None:
        """Forward, loss and backward of all parts."""
        self.model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        with autocast(self.recipe, self.device.type):
            inputs = (self.tokens,) if self.first else ()
            options: dict[str, Any] = {"target": self.targets, "losses": losses} if self.last else {}
            self.schedule.step(*inputs, **options)
        self.loss = torch.stack(losses).mean().detach() if losses else None

    def ran(self) -> Ran:
        return _ran_together(super().ran(), self.workload, self.ranks)


def parallel_step(workload: Workload, device: torch.device) -> Step:
    """This rank's part of the workload's phases."""
    return model_step(workload, device, PipelineStep if workload.recipe.parallel == "pp" else ParallelStep)


class _Called(nn.Module):
    """A model whose forward is one of its functions."""

    def __init__(self, model: Transformer, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, tokens: Tensor) -> Tensor:
        return self.function(tokens)


class _Stage(nn.Module):
    """Some blocks; before the first ones the embedding, after the last ones norm and head."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        super().__init__()
        bounds = [len(model.blocks) * n // ranks.world for n in (ranks.rank, ranks.rank + 1)]
        self.blocks = nn.ModuleList(model.blocks[bounds[0] : bounds[1]])
        self.embedding = model.embedding if ranks.rank == 0 else None
        self.positions = model.positions if ranks.rank == 0 else None
        self.norm = model.norm if ranks.rank == ranks.world - 1 else None
        self.head = model.head if ranks.rank == ranks.world - 1 else None
        self.rope = model.rope

    def forward(self, x: Tensor) -> Tensor:
        angles = self.rope(x.shape[1], x.device) if self.rope is not None else None
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = x + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, angles)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _mesh(way: str, ranks: Ranks, device: torch.device) -> DeviceMesh:
    tensor = {"tp": ranks.world, "fsdp2+tp": TENSOR_RANKS}.get(way, 1)
    return init_device_mesh(device.type, (ranks.world // tensor, tensor), mesh_dim_names=("data", "tensor"))


def _share_matmuls(model: Transformer, mesh: DeviceMesh) -> None:
    """Columns of the first matmul of a pair, rows of the second: one all-reduce for both, forward and backward."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    group = mesh.get_group()
    for block in cast("Iterable[Block]", model.blocks):
        columns = [
            "attention.q",
            "attention.k",
            "attention.v",
            *(f"mlp.{one}" for one in ("gate", "up") if hasattr(block.mlp, one)),
        ]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        _sum_gradients(block.attention, group)
    if not model.spec.tied:
        parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))


def _sum_gradients(attention: Attention, group: Any) -> None:
    """Norms of queries and keys see this rank's heads alone: their gradients are parts of a sum."""

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=group)
        return gradient

    for norm in filter(None, (attention.q_norm, attention.k_norm)):
        norm.weight.register_hook(summed)


def _shard(model: Transformer, mesh: DeviceMesh, compute: torch.dtype | None) -> None:
    """FSDP2: every block gathers its weights before it is used, in the compute dtype, and lets them go after."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _by_mesh(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault(None if mesh is None else mesh.ndim, []).append(parameter)
    return [{"params": params} for params in groups.values()]


def _ran_together(ran: Ran, workload: Workload, ranks: Ranks) -> Ran:
    """What all ranks ran: the loss is the mean over their parts, the parameters are the model's."""
    losses = [loss for loss in ranks.gathered(ran.loss) if loss is not None]
    mean = sum(losses) / len(losses) if losses else None
    return msgspec.structs.replace(ran, loss=mean, parameters=cast(Any, workload.subject).parameters())
