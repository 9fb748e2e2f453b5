"""The one place that says which flopwise this is."""

__version__ = "0.1.0"
