"""`flopwise mcp`: read-only tools over runs and traces for agents. Only `server` needs the extra `mcp`."""
