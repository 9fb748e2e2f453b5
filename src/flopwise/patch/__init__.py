"""Levers put onto models, optimizers and losses that we did not write: recognise, replace, check, undo."""
