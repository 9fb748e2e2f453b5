"""One file per rule: `check(facts)` gives a finding, or None where nothing is wrong."""
