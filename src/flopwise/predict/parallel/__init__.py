"""How a training step goes when many GPUs share it: kernels of a rank, exchanges over a topology, pipelines, memory."""
