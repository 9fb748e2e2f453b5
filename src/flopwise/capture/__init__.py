"""Runs a workload and writes down what happened; computes no statistics."""
