"""The reference language model and its training: read transformer.py first."""
