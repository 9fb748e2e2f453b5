"""The loop that the scripts of tests begin with."""

LOOP = """
import os, signal, sys, torch
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""
