"""The process that measures, `python -m flopwise.worker`: `capture.isolate.Worker` starts it and speaks to it in JSON lines."""
