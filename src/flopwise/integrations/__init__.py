"""flopwise inside other tools: pytest."""
