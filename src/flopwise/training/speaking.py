"""A checkpoint that speaks."""

from collections.abc import Sequence
from pathlib import Path

import torch

from flopwise.capture.build import resolve_device
from flopwise.capture.environment import environment
from flopwise.capture.model_step import check_supported
from flopwise.errors import FlopwiseError
from flopwise.lm.precision import apply_fp32_matmul, torch_dtype, weights_dtype
from flopwise.lm.sampling import Drawn, Sampler
from flopwise.lm.transformer import Transformer
from flopwise.records.run import Environment
from flopwise.spec.recipe import Recipe
from flopwise.training import checkpoint


class Speaker:
    """A checkpoint's model on a device, cast as the recipe says."""

    def __init__(self, path: Path, recipe: Recipe, device: str) -> None:
        self.device, self.recipe = resolve_device(device), recipe
        check_supported(recipe, self.device)
        apply_fp32_matmul(recipe)
        self.spec, self.step, self._state = checkpoint.read(path)

    @property
    def environment(self) -> Environment:
        return environment(self.device)

    @property
    def weight_bytes(self) -> int:
        return self.spec.parameters() * weights_dtype(self.recipe).itemsize

    def speak(
        self, prompts: Sequence[Sequence[int]], new: int, temperature: float, top_p: float, seed: int, cache: str
    ) -> Drawn:
        """`new` tokens after every prompt; `cache`: the dtype of keys and values."""
        positions = max(map(len, prompts)) + new
        most = self.spec.max_context if self.spec.positions == "learned" else self.spec.window
        if most and positions > most:
            text = f"{positions} tokens, the prompt's included, are more than the {most} that the model can see"
            raise FlopwiseError(text, f"--tokens {max(1, most - positions + new)}, or a shorter prompt")
        with torch.device(self.device):
            model = Transformer(self.spec, self.recipe, positions)
        try:
            model.load_state_dict(self._state["model"])
        except RuntimeError as error:
            raise FlopwiseError(f"the checkpoint's weights do not fit: {error}", "train again") from None
        model.to(weights_dtype(self.recipe))
        if self.recipe.compile != "off":
            for block in model.blocks:
                block.compile(dynamic=True)
        sampler = Sampler(model, len(prompts), positions, torch_dtype(cache), self.recipe.graph == "on")
        return sampler.draw(prompts, new, temperature, top_p, seed)
