"""Options that several verbs share."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from flopwise.errors import FlopwiseError
from flopwise.spec.recipe import CHOICES, read_toml, recipe_from
from flopwise.spec.workload import IMPLEMENTATIONS, PHASES

_F = TypeVar("_F", bound=Callable[..., Any])


def workload_options(function: _F) -> _F:
    """Size, phase and levers. Values are checked by the spec, which says what is allowed."""
    options = [
        click.option("--batch", type=int, metavar="N", help="Sequences per step."),
        click.option("--context", type=int, metavar="N", help="Tokens per sequence."),
        click.option(
            "--phase",
            metavar="|".join(PHASES),
            help="forward: inference; backward: with loss and gradients; train: the whole step.",
        ),
        *(
            click.option(f"--{lever}", metavar="|".join(allowed), help=LEVERS_TOLD[lever])
            for lever, allowed in CHOICES.items()
        ),
        click.option("--checkpoint", metavar="off|N", help=LEVERS_TOLD["checkpoint"]),
        click.option(
            "--recipe", "recipe_file", metavar="FILE.toml", help="Levers from a file; options given beside it win."
        ),
        click.option(
            "--implementation", metavar="|".join(IMPLEMENTATIONS), help="For hf: workloads: whose model code."
        ),
        click.option(
            "--set",
            "changes",
            multiple=True,
            metavar="FIELD=VALUE",
            help="A field of the model (n_layers=2) or operation (dim=512).",
        ),
    ]
    return _apply(options, function)


LEVERS_TOLD = {
    "precision": "What the matmuls compute in; bf16 and fp16 are autocast.",
    "attention": "How attention is computed; flash is our Triton kernel.",
    "norm": "Normalisation written out, torch's own, or our kernel (RMSNorm).",
    "activation": "Activation written out, torch's own, or our kernel (cuda: GeLU alone).",
    "rope": "Rotary positions written out, or our kernel.",
    "projections": "One matmul for queries, keys and values, and one for SwiGLU's two; or one each.",
    "loss": "Whole logits, chunks of them, or chunks with the head's matmul and our kernel.",
    "optimizer": "AdamW: written out, per list, fused, or our kernel over all tensors.",
    "compile": "torch.compile of the whole, or of one block that all layers use.",
    "graph": "The whole step in one CUDA graph.",
    "overlap": "Update each block's weights within the backward pass, beside its matmuls.",
    "checkpoint": "Recompute activations, in segments of N blocks.",
}


def device_option(function: _F) -> _F:
    return _apply(
        [
            click.option(
                "--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where to run."
            )
        ],
        function,
    )


def sampling_options(function: _F) -> _F:
    options = [
        click.option("--warmup", type=int, metavar="N", help="Exactly N warm-up steps; without it, until steady."),
        click.option(
            "--samples", type=int, metavar="N", help="Exactly N samples; without it, until ±1 % or the budget ends."
        ),
        click.option("--seconds", type=float, default=10.0, show_default=True, help="The budget for sampling."),
        click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until a point is ended."),
    ]
    return _apply(options, function)


def run_options(function: _F) -> _F:
    options = [
        click.option("--runs", metavar="DIR", help="Where runs are kept (else $FLOPWISE_RUNS, else .flopwise/runs)."),
        click.option("--quiet", "-q", is_flag=True, help="No progress."),
    ]
    return _apply(options, function)


def output_options(function: _F) -> _F:
    options = [
        click.option(
            "--format", "form", metavar="table|json|csv|markdown", help="Else the suffix of -o decides, else table."
        ),
        click.option("-o", "--output", metavar="FILE", help="Write there instead of to standard output."),
    ]
    return _apply(options, function)


def _apply(options: Sequence[Callable[[Any], Any]], function: _F) -> _F:
    for option in reversed(options):
        function = option(function)
    return function


def workload_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Take the workload's options out of what click parsed, as the API wants them."""
    changes, recipe_file = given.pop("changes"), given.pop("recipe_file")
    names = ("batch", "context", "phase", "implementation", "checkpoint", *CHOICES)
    arguments = {name: value for name in names if (value := given.pop(name)) is not None}
    if recipe_file:
        arguments["recipe"] = recipe_from(read_toml(recipe_file, "a recipe"))
    return arguments | {"set": assignments(changes)}


def assignments(words: tuple[str, ...]) -> dict[str, Any]:
    """`a=1,b=x` as a table.

    >>> assignments(("n_layers=2,mlp=gelu", "tied=true"))
    {'n_layers': 2, 'mlp': 'gelu', 'tied': True}
    """
    table: dict[str, Any] = {}
    for word in (part for group in words for part in group.split(",")):
        field, sign, value = word.partition("=")
        if not sign or not field.strip():
            raise FlopwiseError(f"'{word}' is not FIELD=VALUE", "for example n_layers=2")
        table[field.strip()] = _value(value.strip())
    return table


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def command_line() -> str:
    """The command as it was typed, for the record."""
    return shlex.join(["flopwise", *sys.argv[1:]])
