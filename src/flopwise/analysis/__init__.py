"""Pure functions over what was measured: no torch, no files, no clock."""
