"""A training script before and after one line: its step's time, its losses, and a checkpoint from before that fits after.

flopwise tune benchmarks/user_models.py:hf_gpt2 --save fast.toml; python benchmarks/apply_script.py fast.toml
"""

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import flopwise

torch.manual_seed(0)
config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, config.vocab_size, (8, 1024), device="cuda")


def train_step(batch):
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def run(step, count):
    losses = [step(tokens) for _ in range(count)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    losses += [step(tokens) for _ in range(20)]
    torch.cuda.synchronize()
    print(f"{(time.perf_counter() - began) / 20 * 1e3:.2f} ms a step, loss {losses[count - 1]:.4f} after {count} steps")


def checkpoint():
    return {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}


torch.save(checkpoint(), "/tmp/before.pt")
run(train_step, 5)
applied = flopwise.apply(model, optimizer, recipe=sys.argv[1])
saved = torch.load("/tmp/before.pt")
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
run(applied.step(train_step), 5)
after = checkpoint()
applied.undo()
model.load_state_dict(after["model"])
optimizer.load_state_dict(after["optimizer"])
print(f"undone: loss {train_step(tokens):.4f}", *applied.refused, sep="\n")
