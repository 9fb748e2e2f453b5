"""Rules for a step on the CPU, one file each: `check(facts)` gives a finding, or None where the trace has no evidence."""

from flopwise.advice.host_rules import cpu_data_loading, cpu_double, cpu_eager, cpu_optimizer, cpu_threads

ALL_HOST_RULES = (cpu_data_loading, cpu_eager, cpu_optimizer, cpu_threads, cpu_double)
