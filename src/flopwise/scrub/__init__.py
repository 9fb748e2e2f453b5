"""Copies of traces that are safe to share: secrets are taken out."""
