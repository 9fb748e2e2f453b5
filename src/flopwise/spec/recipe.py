"""The levers: everything that changes how a step runs without changing what it computes."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.spec import fields

_BY_TORCH = ("ddp", "zero1", "fsdp2", "tp", "fsdp2+tp", "pp")
_OUR_OWN = ("own-ddp", "own-ddp-naive", "own-ddp-flat", "own-ddp-bucketed", "own-zero1", "own-fsdp")
CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16", "bf16-pure", "bf16-master", "fp8", "fp8-rowwise"),
    "attention": ("naive", "sdpa", "sdpa-flash", "sdpa-cudnn", "flex", "flash"),
    "norm": ("eager", "torch", "triton"),
    "activation": ("eager", "torch", "triton", "cuda"),
    "rope": ("eager", "triton"),
    "projections": ("separate", "fused"),
    "loss": ("full", "chunked", "fused"),
    "optimizer": ("adamw-loop", "foreach", "fused", "flopwise", "flopwise-bf16"),
    "compile": ("off", "default", "max-autotune", "blocks", "reduce-overhead"),
    "graph": ("off", "on"),
    "overlap": ("off", "on"),
    "parallel": ("off", *_BY_TORCH, *_OUR_OWN),
    "cache": ("compute", "fp32", "bf16", "fp16"),
}
DATA_PARALLEL = ("ddp", "zero1", "fsdp2", *_OUR_OWN)  # each rank has its part of the batch
SHARDED_WEIGHTS = ("fsdp2", "tp", "fsdp2+tp", "pp", "own-fsdp")  # no rank has them all
TENSOR_RANKS = 2  # of fsdp2+tp: so many share each matmul

WHOLE = ("default", "max-autotune", "reduce-overhead")  # values of `compile` that take the whole model
REPLAYED = "reduce-overhead"  # compiled, and its forward and backward passes replayed as CUDA graphs
OWN_OPTIMIZERS = ("flopwise", "flopwise-bf16")
FP8 = ("fp8", "fp8-rowwise")  # the blocks' linear layers in fp8; all else as with bf16-master
WITH_MASTERS = ("bf16-master", *FP8)  # our optimizer keeps what bf16 weights lack of fp32
SCALES_ON_DEVICE = ("fused", *OWN_OPTIMIZERS)  # optimizers that take the loss scale back themselves


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a step runs. The defaults are what plain PyTorch code does.

    >>> Recipe(precision="bf16", attention="sdpa").changed()
    {'precision': 'bf16'}
    """

    # bf16 and fp16: autocast over fp32 weights; bf16-pure: weights, gradients and state in bf16; bf16-master: weights and
    # gradients in bf16, and our optimizer keeps what the weights lack of fp32; fp8: so too, and linear layers multiply in fp8,
    # with one scale for each tensor or (fp8-rowwise) one for each row.
    precision: str = "fp32"
    attention: str = "sdpa"  # flash: flopwise's own FlashAttention-2 in Triton
    norm: str = "torch"
    activation: str = "torch"
    rope: str = "eager"
    projections: str = "separate"  # fused: q, k and v are one matmul, and SwiGLU's gate and up another
    loss: str = "full"  # chunked and fused never hold all logits
    optimizer: str = "foreach"  # flopwise: all tensors in one launch of our own; flopwise-bf16: with moments in bf16
    compile: str = "off"  # blocks: one Transformer block, compiled once and used for every layer; and the loss
    # reduce-overhead: the whole model, and what was compiled is replayed as CUDA graphs
    graph: str = "off"  # the whole step captured in one CUDA graph
    overlap: str = "off"  # weights are updated within the backward pass, block by block, during its matmuls
    checkpoint: int = 0  # recompute activations, in segments of this many blocks; 0: keep them all
    parallel: str = "off"  # how processes share a step: PyTorch's ways, or (own-) ours, written to be read
    cache: str = "compute"  # the dtype of the keys and values that generation keeps
    ranks: int = 1  # processes, each with a GPU of its own where there are as many

    def __post_init__(self) -> None:
        for field, allowed in CHOICES.items():
            fields.one_of(field, getattr(self, field), allowed)
        fields.whole("checkpoint", self.checkpoint, 0, 100_000)
        fields.whole("ranks", self.ranks, 1, 4096)
        if self.graph == "on" and self.precision == "fp16" and self.optimizer not in SCALES_ON_DEVICE:
            raise FlopwiseError(
                f"graph = 'on' with precision = 'fp16' and optimizer = '{self.optimizer}' is not allowed: "
                "loss scaling asks the host whether to skip the step",
                "allowed: optimizer = fused or flopwise, which decide on the GPU; or precision = bf16",
            )
        if self.overlap == "on" and self.precision == "fp16":
            raise FlopwiseError(
                "overlap = 'on' with precision = 'fp16' is not allowed: loss scaling looks at all gradients before any update",
                "allowed: precision = bf16, or overlap = off",
            )
        for lever, why in (
            ("graph", "both capture the same kernels"),
            ("overlap", "a graph's gradients all come at its end, in memory that the next step writes over"),
        ):
            if self.compile == REPLAYED and getattr(self, lever) == "on":
                raise FlopwiseError(
                    f"{lever} = 'on' with compile = '{REPLAYED}' is not allowed: {why}",
                    f"allowed: {lever} = off, or compile = default",
                )
        for refused, message, hint in _parallel_rules(self):
            if refused:
                raise FlopwiseError(message, hint)

    @property
    def data_ranks(self) -> int:
        """How many parts the batch has, each on ranks of its own.

        >>> Recipe(parallel="fsdp2+tp", ranks=8).data_ranks, Recipe(parallel="pp", ranks=8).data_ranks
        (4, 1)
        """
        if self.parallel == "fsdp2+tp":
            return max(1, self.ranks // TENSOR_RANKS)
        return self.ranks if self.parallel in DATA_PARALLEL else 1

    @property
    def weights(self) -> str:
        """The dtype of weights and gradients.

        >>> Recipe(precision="bf16").weights, Recipe(precision="bf16-pure").weights
        ('fp32', 'bf16')
        """
        return "bf16" if self.precision in ("bf16-pure", *WITH_MASTERS) else "fp32"

    @property
    def compute(self) -> str:
        """The dtype of activations, and the precision of every matmul but those of `linear`."""
        return "bf16" if self.precision in FP8 else self.precision.partition("-")[0]

    @property
    def linear(self) -> str:
        """The precision of the linear layers' matmuls.

        >>> Recipe(precision="fp8-rowwise").linear, Recipe(precision="bf16-master").linear
        ('fp8', 'bf16')
        """
        return self.precision.partition("-")[0]

    def changed(self) -> dict[str, Any]:
        """The levers that differ from the defaults."""
        return {f: v for f, default in _defaults().items() if (v := getattr(self, f)) != default}


@cache
def _defaults() -> dict[str, Any]:
    return msgspec.structs.asdict(Recipe())


_Rules = Iterator[tuple[object, str, str]]  # whether it is refused, why, and what to do


def _parallel_rules(recipe: Recipe) -> _Rules:
    way = f"parallel = '{recipe.parallel}'"
    if recipe.parallel == "off":
        return
    for lever in ("graph", "overlap"):
        yield (
            getattr(recipe, lever) == "on",
            f"{lever} = 'on' with {way} is not allowed: it is for one process",
            f"allowed: {lever} = off, or parallel = off",
        )
    yield (
        recipe.precision == "fp16",
        f"precision = 'fp16' with {way} is not allowed: ranks would skip steps apart",
        "allowed: precision = fp32, tf32, bf16",
    )
    sharded, own = recipe.parallel in SHARDED_WEIGHTS, recipe.parallel.startswith("own-")
    zero = recipe.parallel in ("zero1", "own-zero1")
    for lever, plain in (
        ("optimizer", ("adamw-loop", "foreach", "fused")),
        ("precision", ("fp32", "tf32", "bf16", "bf16-pure")),
    ):
        yield (
            (sharded or zero) and getattr(recipe, lever) not in plain,
            f"{lever} = '{getattr(recipe, lever)}' with {way} is not allowed: weights or their state are in parts",
            f"allowed: {lever} = {', '.join(plain)}",
        )
    for lever, usual in (("loss", "full"), ("projections", "separate")):
        yield (
            sharded and getattr(recipe, lever) != usual,
            f"{lever} = '{getattr(recipe, lever)}' with {way} is not allowed: it takes weights whole",
            f"allowed: {lever} = {usual}",
        )
    either = tuple(value for value in CHOICES["compile"] if value != REPLAYED)  # no graph holds an exchange
    whole = ("off",) if own or recipe.parallel == "pp" else ("off", "blocks") if sharded else either
    yield (
        recipe.compile not in whole,
        f"compile = '{recipe.compile}' with {way} is not allowed",
        f"allowed: compile = {', '.join(whole)}",
    )
    yield (
        recipe.parallel == "pp" and recipe.checkpoint,
        f"checkpoint = {recipe.checkpoint} with {way} is not allowed",
        "allowed: checkpoint = off",
    )


LEVERS = Recipe.__struct_fields__


def levers_to_apply(recipe: Recipe, written: Recipe) -> dict[str, Any]:
    """What a recipe has otherwise than the code as written.

    >>> levers_to_apply(Recipe(precision="bf16", optimizer="fused"), written=Recipe(precision="bf16"))
    {'optimizer': 'fused'}
    """
    return {name: getattr(recipe, name) for name in LEVERS if getattr(recipe, name) != getattr(written, name)}


def parse_checkpoint(value: str | int) -> int:
    """`off` or a number of blocks.

    >>> parse_checkpoint("off"), parse_checkpoint("4")
    (0, 4)
    """
    if value in ("off", "0", 0):
        return 0
    number = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise FlopwiseError(
            f"checkpoint = {fields.show(value)} is not allowed", "allowed: off, or every how many blocks (1, 2, …)"
        )
    return number


def recipe_from(levers: dict[str, Any]) -> Recipe:
    """A recipe from named levers; names and values are checked.

    >>> recipe_from({"precision": "bf16", "checkpoint": "2"}).checkpoint
    2
    """
    fields.known("the recipe", levers, LEVERS)
    given = dict(levers)
    if "checkpoint" in given:
        given["checkpoint"] = parse_checkpoint(given["checkpoint"])
    for switch in ("graph", "overlap"):
        if isinstance(given.get(switch), bool):
            given[switch] = "on" if given[switch] else "off"
    return Recipe(**given)


_MOST_DOTS = 100  # between two commas or ends of lines


def read_toml(path: str | Path, what: str, page: str = "docs/reference/sweeps.md") -> dict[str, Any]:
    """A TOML file as a table, or one clear line."""
    try:
        if (place := Path(path).expanduser()).is_fifo():
            raise FlopwiseError(f"cannot read {path}: it is a pipe, not a file", f"give the path of {what}")
        with place.open("rb") as file:
            text = file.read(2**20 + 1)
        if len(text) > 2**20:
            raise FlopwiseError(f"{path} is too large for {what}", "such a file has a few KiB")
        lines = (part for part in re.split(rb"[,\n]", text) if not part.lstrip().startswith(b"#"))
        if any(part.count(b".") > _MOST_DOTS for part in lines):  # which takes gigabytes to read
            raise FlopwiseError(
                f"{path} is no {what.removeprefix('a ')}: a name in it has too many parts", f"see {page}"
            )
        return tomllib.loads(text.decode())
    except OSError as error:
        raise FlopwiseError(f"cannot read {path}: {error.strerror}", f"give the path of {what}") from None
    except (
        ValueError,
        RuntimeError,
    ) as error:  # not TOML, not UTF-8, nested too deep, no such home, a null in the path
        hint, said = f"see {page} for an example", str(error)
        if isinstance(error, RecursionError) or "set_int_max_str_digits" in said:
            said = "it is nested too deep" if isinstance(error, RecursionError) else "a number has too many digits"
        raise FlopwiseError(f"{path} is not valid TOML: {said}", hint) from None


def named(levers: dict[str, str]) -> str:
    """Levers as people read them.

    >>> named({"compile": "blocks", "rope": "eager"})
    'compile = blocks, rope = eager'
    """
    return ", ".join(f"{lever} = {value}" for lever, value in levers.items())
