"""Memory snapshots -> timeline, owners, stacks. No torch here."""
