"""Several processes, one run: torchrun --nproc-per-node 2 -m flopwise run examples/ddp.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(1000):
    inputs = torch.randn(64, 256, device=device)
    loss = (parallel(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

dist.destroy_process_group()
