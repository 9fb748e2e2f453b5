"""Options that several verbs share."""

import shlex
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import click

from flopwise.analysis.measured import MeasuredRun
from flopwise.cli.output import kept
from flopwise.errors import FlopwiseError
from flopwise.records.training import Training
from flopwise.redact import redacted_words
from flopwise.spec.recipe import CHOICES, read_toml, recipe_from
from flopwise.spec.workload import IMPLEMENTATIONS, PHASES
from flopwise.store import check_tag, runs_root
from flopwise.store import tag as tag_run

_F = TypeVar("_F", bound=Callable[..., Any])
_Run = TypeVar("_Run", bound=MeasuredRun | Training)

LEVER_HELP = {
    "precision": "What the matmuls compute in; bf16 and fp16 are autocast.",
    "attention": "How attention is computed; flash is flopwise's Triton kernel.",
    "norm": "Normalisation written out, torch's own, or flopwise's kernel (RMSNorm).",
    "activation": "Activation written out, torch's own, or flopwise's kernel (cuda: GeLU only).",
    "rope": "Rotary positions written out, or flopwise's kernel.",
    "projections": "One matmul for queries, keys and values, and one for SwiGLU's two; or one each.",
    "loss": "Whole logits, chunks of them, or chunks with the head's matmul and flopwise's kernel.",
    "optimizer": "AdamW: written out, per list, fused, or flopwise's kernel over all tensors.",
    "compile": "torch.compile of the whole model, or of one block that all layers use.",
    "graph": "The whole step in one CUDA graph.",
    "overlap": "Update each block's weights within the backward pass, at the same time as its matmuls.",
    "checkpoint": "Recompute activations, in segments of N blocks.",
    "parallel": "How several processes share the step: PyTorch's ways, or our own, written to be read (own-).",
    "cache": "The dtype of the keys and values that generation keeps (prefill, decode).",
    "ranks": "So many processes, by torchrun; each has a GPU of its own where there are as many.",
}
SIDES = ("m", "n", "k")  # of op:matmul, as short for --set
_PHASE = "forward: logits of all tokens; backward: with loss and gradients; train: the whole step; prefill, decode: generation."
_SET = "A field of the model (n_layers=2) or operation (dim=512), or an argument of your factory."


def _together(*options: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Several options as one decorator."""
    return lambda function: reduce(lambda made, option: option(made), reversed(options), function)


# Values are checked by the spec, which says what is allowed.
workload_options = _together(
    click.option("--batch", type=int, metavar="N", help="Sequences per step."),
    click.option("--context", type=int, metavar="N", help="Tokens per sequence."),
    click.option("--phase", metavar="|".join(PHASES), help=_PHASE),
    *(click.option(f"--{name}", metavar="|".join(values), help=LEVER_HELP[name]) for name, values in CHOICES.items()),
    click.option("--checkpoint", metavar="off|N", help=LEVER_HELP["checkpoint"]),
    click.option("--ranks", type=int, metavar="N", help=LEVER_HELP["ranks"]),
    click.option("--recipe", "recipe_file", metavar="FILE.toml", help="Levers from a file; other options override it."),
    click.option("--implementation", metavar="|".join(IMPLEMENTATIONS), help="For hf: workloads: whose model code."),
    click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help=_SET),
    *(
        click.option(f"--{side}", type=int, metavar="N", hidden=True, help=f"--set {side}=N, of op:matmul.")
        for side in SIDES
    ),
    click.option("--causal", metavar="on|off", hidden=True, help="--set causal=off, of op:attention."),
)


def levers(*names: str) -> Callable[[_F], _F]:
    """Options for some of the levers."""
    return _together(
        *(click.option(f"--{name}", metavar="|".join(CHOICES[name]), help=LEVER_HELP[name]) for name in names)
    )


device_option = click.option(
    "--device", default="auto", show_default=True, metavar="auto|cpu|cuda[:N]", help="Where to run."
)
sampling_options = _together(
    click.option("--warmup", type=int, metavar="N", help="Exactly N warm-up steps; by default, until steady."),
    click.option(
        "--samples",
        type=int,
        metavar="N",
        help="Exactly N samples of a process; by default, until ±1 % or the budget ends.",
    ),
    click.option(
        "--processes", type=int, metavar="N", help="Exactly N processes, or pairs of them; by default, as needed."
    ),
    click.option("--seconds", type=float, default=10.0, show_default=True, help="The budget for sampling."),
    click.option("--timeout", type=float, default=900.0, show_default=True, help="Seconds until a point is stopped."),
)
on_option = click.option(
    "--on",
    default="local",
    show_default=True,
    metavar="local|ray|ray://HOST:PORT|slurm",
    help="Run on this machine, or on a cluster.",
)
runs_option = click.option(
    "--runs", metavar="DIR", help="Where runs are stored (default: $FLOPWISE_RUNS, or .flopwise/runs)."
)
run_options = _together(runs_option, click.option("--quiet", "-q", is_flag=True, help="No progress."))
tag_option = click.option("--tag", help="A name for the run.")


def workload_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Take the workload's options out of what click parsed, as the API wants them."""
    changes, recipe_file = given.pop("changes"), given.pop("recipe_file")
    names = ("batch", "context", "phase", "implementation", "checkpoint", "ranks", *CHOICES)
    arguments = {name: value for name in names if (value := given.pop(name)) is not None}
    if recipe_file:
        arguments = _levers_in(recipe_file) | arguments
    sides = {side: value for side in (*SIDES, "causal") if (value := given.pop(side)) is not None}
    return arguments | {"set": sides | assignments(changes)}


def _levers_in(recipe_file: str) -> dict[str, Any]:
    table = read_toml(recipe_file, "a recipe")
    recipe_from(table)  # its names and values are checked as the file's, not as options
    return table


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


def tagged(measure: Callable[[], _Run], tag: str | None, runs: str | None) -> tuple[_Run, bool]:
    """Measure, and give the run a name; a name that is not allowed is refused first. Also: whether Ctrl-C stopped it."""
    if tag is not None:
        check_tag(tag)
    run, stopped = kept(measure)
    if tag is not None:
        tag_run(runs_root(runs), run.path, tag)
    return run, stopped


def command_line() -> str:
    """The command as it was typed, for the record; without secrets."""
    return shlex.join(["flopwise", *redacted_words(sys.argv[1:])])
