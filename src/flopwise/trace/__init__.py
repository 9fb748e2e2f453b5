"""Raw trace files become one Trace, whatever the profiler was. No torch here."""
