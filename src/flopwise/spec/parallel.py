"""How a step is shared among ranks: which can be, and into what parts."""

from collections.abc import Iterator

from flopwise.spec.model import ModelSpec
from flopwise.spec.recipe import CHOICES, TENSOR_RANKS, Recipe

Rules = Iterator[tuple[object, str, str]]  # whether the workload is refused, why, and what to do


def parallel_rules(spec: ModelSpec, recipe: Recipe, batch: int, trained: bool) -> Rules:
    """Which steps cannot be shared by ranks. `trained`: it is a training step of flopwise's own model."""
    way = f"parallel = '{recipe.parallel}'"
    yield (
        recipe.ranks > 1 and recipe.parallel == "off",
        f"ranks = {recipe.ranks} needs a way to share the step",
        f"--parallel {'|'.join(CHOICES['parallel'][1:7])}",
    )
    if recipe.parallel == "off":
        return
    yield (
        not trained,
        f"{way} is for training flopwise's own model",
        "allowed: phase = backward, train; your own script runs under torchrun: flopwise run --help",
    )
    yield (
        recipe.parallel == "fsdp2+tp" and recipe.ranks % TENSOR_RANKS,
        f"{way} needs an even number of ranks, and ranks = {recipe.ranks}",
        f"{TENSOR_RANKS} ranks share each matmul",
    )
    yield (
        batch % recipe.data_ranks,
        f"batch = {batch} does not divide among {recipe.data_ranks} ranks",
        f"give a multiple of {recipe.data_ranks}: it is the whole step's",
    )
    tensor = tensor_ranks(recipe)
    for field in ("n_heads", "n_kv_heads", "d_ff", "vocab"):
        yield (
            getattr(spec, field) % tensor,
            f"{field} = {getattr(spec, field)} does not divide among {tensor} ranks, which {way} needs",
            f"fewer --ranks, or --set {field}={-(-getattr(spec, field) // tensor) * tensor}",
        )
    if recipe.parallel == "pp":
        yield (
            recipe.ranks > spec.n_layers,
            f"{way} with ranks = {recipe.ranks} needs as many layers, and {spec.name} has {spec.n_layers}",
            f"allowed: ranks = 1 to {spec.n_layers}",
        )
        yield (
            spec.tied,
            f"{way} has the embedding and the head on two ranks, and {spec.name} ties them",
            "--set tied=false",
        )
        yield (
            batch % pipeline_parts(batch, recipe.ranks),
            f"batch = {batch} has no parts for {recipe.ranks} ranks",
            f"give a multiple of {recipe.ranks}",
        )


def tensor_ranks(recipe: Recipe) -> int:
    """How many ranks share each matmul."""
    return {"tp": recipe.ranks, "fsdp2+tp": TENSOR_RANKS}.get(recipe.parallel, 1)


def pipeline_parts(batch: int, ranks: int) -> int:
    """How many parts of the batch go through a pipeline one after the other: two of each rank, or as many as there are.

    >>> pipeline_parts(16, 4), pipeline_parts(4, 4), pipeline_parts(2, 4)
    (8, 4, 2)
    """
    return min(batch, 2 * ranks)
