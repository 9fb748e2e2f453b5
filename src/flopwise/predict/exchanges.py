"""What the ranks of a shared step exchange, and how long that takes if nothing hides it."""

import math

import msgspec

from flopwise.predict.collectives import NVLINK, PCIE, specified
from flopwise.predict.constants import SLOWEST_NVLINK_BYTES_S
from flopwise.predict.shapes.network import weight_shapes
from flopwise.spec.dtypes import item_bytes
from flopwise.spec.gpu import Gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.parallel import pipeline_parts, tensor_ranks
from flopwise.spec.rank_share import rank_share
from flopwise.spec.recipe import Recipe
from flopwise.spec.workload import Workload
from flopwise.work.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE_SCATTER, SEND_RECEIVE


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective of one step, on one rank. `n_bytes`: of the larger of its two buffers, each time."""

    kind: str
    ranks: int
    n_bytes: int
    times: int


def exchanged(workload: Workload) -> tuple[Exchanged, ...]:
    """What a step makes its ranks exchange; nothing where one process does it all.

    >>> from flopwise.spec.workload import workload
    >>> [(one.kind, one.times) for one in exchanged(workload("small", batch=8, parallel="fsdp2", ranks=4))]
    [('all-gather', 24), ('all-gather', 1), ('reduce-scatter', 12), ('reduce-scatter', 1)]
    """
    recipe, spec = workload.recipe, rank_share(workload).subject
    if recipe.parallel == "off" or recipe.ranks < 2 or not isinstance(spec, ModelSpec):
        return ()
    own = recipe.parallel.removeprefix("own-")
    found = _of_weights(recipe, spec, own) + (_of_matmuls(workload, spec) if "tp" in own else ())
    return found + (_of_stages(workload, spec) if own == "pp" else ())


def _of_weights(recipe: Recipe, spec: ModelSpec, way: str) -> tuple[Exchanged, ...]:
    sizes = {name: math.prod(shape) for name, shape in weight_shapes(spec).items()}
    item, ranks = item_bytes(recipe.weights), recipe.data_ranks
    everything = sum(sizes.values()) * item
    if ranks < 2:
        return ()
    if way.startswith("ddp") or way == "zero1":
        reduced = Exchanged(kind=ALL_REDUCE, ranks=ranks, n_bytes=everything, times=1)
        # Of a sharded optimizer, what each rank has updated goes to all others.
        sent = Exchanged(kind=BROADCAST, ranks=ranks, n_bytes=everything, times=1)
        return (reduced, sent) if way == "zero1" else (reduced,)
    if not way.startswith("fsdp"):
        return ()
    gathered = item_bytes("bf16") if recipe.precision == "bf16" else item
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    root = sum(size for name, size in sizes.items() if not name.startswith("blocks."))
    return (  # forward gathers every block and the rest, backward every block once more
        Exchanged(kind=ALL_GATHER, ranks=ranks, n_bytes=block * gathered, times=2 * spec.n_layers),
        Exchanged(kind=ALL_GATHER, ranks=ranks, n_bytes=root * gathered, times=1),
        Exchanged(kind=REDUCE_SCATTER, ranks=ranks, n_bytes=block * item, times=spec.n_layers),
        Exchanged(kind=REDUCE_SCATTER, ranks=ranks, n_bytes=root * item, times=1),
    )


def _of_matmuls(workload: Workload, spec: ModelSpec) -> tuple[Exchanged, ...]:
    """Tensor parallelism: the output of attention and of the MLP forward, their inputs' gradients backward."""
    size = _activations(workload, spec)
    return (Exchanged(kind=ALL_REDUCE, ranks=tensor_ranks(workload.recipe), n_bytes=size, times=4 * spec.n_layers),)


def _of_stages(workload: Workload, spec: ModelSpec) -> tuple[Exchanged, ...]:
    """A pipeline: activations to the next stage and their gradients back, part by part."""
    parts = pipeline_parts(workload.batch, workload.recipe.ranks)
    size = _activations(workload, spec) // parts
    return (Exchanged(kind=SEND_RECEIVE, ranks=2, n_bytes=size, times=2 * parts),)


def _activations(workload: Workload, spec: ModelSpec) -> int:
    share, recipe = rank_share(workload), workload.recipe
    item = item_bytes(
        "fp32" if recipe.precision in ("fp32", "tf32", "bf16", "fp16") else "bf16"
    )  # of the residual stream
    return share.batch * share.context * spec.d_model * item


def exchange_ns(found: tuple[Exchanged, ...], gpu: Gpu) -> float | None:
    """All of it one after the other over the GPU's own link, by its datasheet; None where that does not say."""
    if not found or not gpu.link_bytes_s:
        return None
    speed = gpu.link_bytes_s / 2  # vendors add up both directions
    link = NVLINK if speed > SLOWEST_NVLINK_BYTES_S else PCIE
    return math.fsum(one.times * specified(one.kind, one.ranks, link, speed).ns(one.n_bytes) for one in found)
