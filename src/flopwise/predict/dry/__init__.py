"""The dry run's parts: a step runs on fake tensors, a tape takes down what happens, the rest reads the tape."""
