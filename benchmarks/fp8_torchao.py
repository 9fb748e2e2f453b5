"""The linear layers of one model in bf16, in torchao's float8 and in flopwise's fp8: forward and backward pass, in turns.

    python benchmarks/fp8_torchao.py [--layers 4 --width 4096 --batch 4 --context 2048] [--eager]

Layers of Llama's shape with weights in bf16; each block is compiled in place unless --eager. torchao has to be installed. Rounds
go through all kinds, so that the clock is the same for each; the table has medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

KINDS = ("bf16", "torchao tensorwise", "torchao rowwise", "flopwise fp8", "flopwise fp8-rowwise")


def made(kind: str, given: argparse.Namespace) -> Callable[[], float]:
    """A step of this kind; it returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=given.width,
        intermediate_size=given.width * 7 // 2,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 128,
        num_key_value_heads=given.width // 512,
        vocab_size=32_000,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.randint(0, config.vocab_size, (given.batch, given.context))
    convert(kind, model)
    for layer in model.model.layers if not given.eager else ():
        layer.compile()

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    return step


def convert(kind: str, model: nn.Module) -> None:
    library, _, how = kind.partition(" ")
    if library == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(how)
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "layers" in name)
    elif library == "flopwise":
        from flopwise.patch.fp8 import replace
        from flopwise.patch.patched import Patched

        replace(model, list(model.model.layers), how.endswith("rowwise"), Patched())  # type: ignore[union-attr, arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in {"layers": 4, "width": 4096, "batch": 4, "context": 2048, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()
    steps: dict[str, Callable[[], float]] = {}
    losses: dict[str, float] = {}
    for kind in given.kinds.split(","):
        began = time.monotonic()
        try:
            step = made(kind, given)
            losses[kind] = [float(step()) for _ in range(3)][-1]
            steps[kind] = step
            print(f"{kind}: ready after {time.monotonic() - began:.0f} s", flush=True)
        except Exception as error:  # noqa: BLE001  the next kind may run
            print(f"{kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(given.rounds):
        for kind, step in steps.items():
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            step()
            ended.record()
            torch.cuda.synchronize()
            times[kind].append(begun.elapsed_time(ended))
    first = statistics.median(times["bf16"]) if "bf16" in times else 0.0
    print("| kind | ms | of bf16 | loss |\n| :-- | --: | --: | --: |")
    for kind, some in times.items():
        middle = statistics.median(some)
        print(f"| {kind} | {middle:.2f} | {first / middle:.2f}x | {losses[kind]:.4f} |")


if __name__ == "__main__":
    main()
