"""What the work should take, before it is run: FLOPs, bytes, memory, time. Arithmetic over a spec; no torch."""
