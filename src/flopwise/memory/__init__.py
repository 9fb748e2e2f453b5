"""Memory snapshots -> timeline, owners, stacks."""
