"""What to run, as plain data: no torch here."""
