"""transformers' Trainer with a callback of flopwise: python examples/trainer.py"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from flopwise.integrations.transformers import FlopwiseCallback

config = LlamaConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=512)
texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (512, 64))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, max_steps=200, per_device_train_batch_size=8, report_to=[], disable_tqdm=True
    )
    Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=texts,
        callbacks=[FlopwiseCallback(steps=10, stop=True)],
    ).train()
