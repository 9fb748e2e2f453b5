"""A training loop watched as it is: its steps found, timed, some of them traced; nothing in its code changes."""
