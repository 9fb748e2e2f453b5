"""The one catalogue of operations: what an op or a kernel is, and what it must compute and move."""
