"""The shape simulator: the reference model and its step as arithmetic over shapes. No torch here."""
