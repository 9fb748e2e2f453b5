"""From numbers to reasons: rules that name what is wrong and what it would save, and `tune`, which tries it."""
