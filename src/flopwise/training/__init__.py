"""Training of a workload's model on a corpus: step.py updates, loop.py counts, checkpoint.py keeps, ranks.py joins processes."""
