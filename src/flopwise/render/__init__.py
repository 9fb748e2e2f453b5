"""Results as text: terminal, Markdown, CSV, JSON."""
