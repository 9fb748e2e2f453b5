"""A training loop as it is, watched from inside: python examples/plain_loop.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flopwise

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))

with flopwise.watch(steps=20) as watch:
    for inputs, targets in DataLoader(data, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

print(watch.screen())
