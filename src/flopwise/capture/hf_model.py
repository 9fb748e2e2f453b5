"""The transformers library's own model with random weights, behind the interface of flopwise's model."""

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from flopwise.errors import FlopwiseError, Unsupported
from flopwise.spec.workload import Workload

_ATTENTION = {"naive": "eager", "sdpa": "sdpa", "sdpa-flash": "sdpa", "sdpa-cudnn": "sdpa", "flex": "flex_attention"}
_LEVERS = {
    "norm": ("torch",),
    "activation": ("torch",),
    "rope": ("eager",),
    "projections": ("separate",),
    "attention": tuple(_ATTENTION),
}
_BACKENDS = {
    "sdpa-flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
}


class HfModel(nn.Module):
    """Built from the config alone: nothing is downloaded, and no code that a config names is run."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        recipe = workload.recipe
        for lever, allowed in _LEVERS.items():
            if (value := getattr(recipe, lever)) not in allowed:
                text = f"{lever} = '{value}' works on flopwise's own model only"
                raise Unsupported(text, "use implementation = flopwise")
        if recipe.checkpoint > 1:
            text = f"checkpoint = {recipe.checkpoint}: transformers recomputes every block or none"
            raise Unsupported(text, "allowed: off, 1")
        self.inner = _causal_lm(dict(workload.hf_config or {}), _ATTENTION[recipe.attention])
        self.backend = _BACKENDS.get(recipe.attention)
        if recipe.checkpoint:
            self.inner.gradient_checkpointing_enable({"use_reentrant": False})

    def hidden(self, tokens: Tensor) -> Tensor:
        with self._backend():
            return cast(Tensor, self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state)

    def forward(self, tokens: Tensor) -> Tensor:
        with self._backend():
            return cast(Tensor, self.inner(input_ids=tokens, use_cache=False).logits)

    @property
    def head_weight(self) -> Tensor:
        return cast(Tensor, self.inner.get_output_embeddings().weight)

    def _backend(self) -> Any:
        return torch.nn.attention.sdpa_kernel(self.backend) if self.backend is not None else nullcontext()


def _causal_lm(config: dict[str, Any], attention: str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        text = "implementation = 'transformers' needs the transformers library"
        raise FlopwiseError(text, "pip install 'flopwise[hf]'") from None
    for field in ("auto_map", "quantization_config", "torch_dtype", "dtype"):
        config.pop(field, None)  # auto_map names code to run; the precision is the recipe's
    family = str(config.pop("model_type", ""))
    try:
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config), attn_implementation=attention)
    except (KeyError, TypeError, ValueError, AssertionError) as error:  # a padding token beyond the vocabulary
        hint = "check the file, or use implementation = flopwise"
        raise FlopwiseError(f"transformers cannot build this config: {error}", hint) from None
