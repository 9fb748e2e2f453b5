"""One training step of a Hugging Face model: flopwise tune examples/hf_step.py:make_step"""

from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_step(device: str, layers: int = 2, width: int = 128, batch: int = 4) -> Callable[[], torch.Tensor]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=width // 64, vocab_size=4096)
    model = LlamaForCausalLM(config).to(device)  # or AutoModelForCausalLM.from_pretrained("…")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (batch, 128), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return step
