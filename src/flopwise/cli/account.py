"""`flopwise account MODEL`."""

from functools import partial
from typing import Any

import click

from flopwise import units
from flopwise.api.account import account, training_run
from flopwise.cli.options import workload_arguments, workload_options
from flopwise.cli.output import Answer, answers
from flopwise.errors import FlopwiseError
from flopwise.render.account_listing import account_shown
from flopwise.render.account_screen import training_screen
from flopwise.render.account_view import account_view, training_view

_MFU = "The share of the peak rate that training reaches: 0.5 or 50%."


@click.command("account")
@click.argument("model", required=False)
@workload_options
@click.option("--gpu", metavar="NAME[,NAME…]", help="h100, h200, a100, …: limits and what fits.")
@click.option("--parameters", metavar="N", help="Instead of MODEL: days to train one of this size (70B), by 6·N·D.")
@click.option("--tokens", metavar="N", help="Days to train on so many tokens: 15T, 300B.")
@click.option("--gpus", type=int, default=1, show_default=True, help="GPUs that train.")
@click.option("--mfu", default="0.5", show_default=True, help=_MFU)
@click.option("--measured", metavar="TIME", help="A step's measured time (24ms): its MFU.")
@click.option("--optimizer-bits", type=int, default=32, show_default=True, metavar="8|32", help="Of AdamW's moments.")
@click.option("--inference", "--decode", is_flag=True, help="Prefill, decode and the KV cache.")
@answers(screens=True)
def command(
    model: str | None,
    gpu: str | None,
    parameters: str | None,
    tokens: str | None,
    mfu: str,
    measured: str | None,
    **given: Any,
) -> Answer:
    """Predict what a step of MODEL costs without running it: FLOPs and bytes by module, memory by owner, what fits.

    \b
    Example: flopwise account small --gpu h100,h200
      small b4 t512 train on H100 SXM 80 GB
      A step takes about 50.0 ms, predicted, bound by its FLOPs. …

    MODEL is a preset (tiny, small, medium, large, xl, 2.7B, gpt2, llama3-8b, …), hf:PATH/config.json, or a step that is run
    dry on fake tensors (path/file.py:factory, op:NAME; needs torch); size, phase and levers as for bench. For a training run:
    flopwise account llama3-70b --gpu h100 --gpus 1024 --tokens 15T --mfu 0.5
    """
    if parameters is not None:
        if others := [name for name, value in workload_arguments(dict(given)).items() if value != {}]:
            raise FlopwiseError(
                f"--parameters goes without --{others[0]}: it is 6·N·D at the bf16 rate", "or give a MODEL"
            )
        return _training(model, parameters, gpu, tokens, given["gpus"], mfu)
    if model is None:
        raise FlopwiseError("no MODEL is given", "a preset, or --parameters 70B --tokens 15T --gpu h100 --gpus 1024")
    found = account(
        model,
        gpu=() if gpu is None else gpu,
        tokens=None if tokens is None else units.parse_count(tokens),
        mfu=units.parse_share(mfu),
        measured_ns=None if measured is None else units.parse_duration(measured),
        **workload_arguments(given),
        **given,
    )
    return Answer(partial(account_view, found), screen=partial(account_shown, found))


def _training(model: str | None, parameters: str, gpu: str | None, tokens: str | None, gpus: int, mfu: str) -> Answer:
    """Days to train, of a size alone."""
    if model is not None or gpu is None or tokens is None:
        what = "goes without a MODEL" if model is not None else "needs --gpu and --tokens"
        raise FlopwiseError(
            f"--parameters {what}", "flopwise account --parameters 70B --tokens 15T --gpu h100 --gpus 1024"
        )
    size, share = units.parse_count(parameters), units.parse_share(mfu)
    one, run = training_run(size, gpu=gpu, tokens=units.parse_count(tokens), gpus=gpus, mfu=share)
    return Answer(training_view(size, run, one.title), screen=lambda: training_screen(size, run, one.title))
