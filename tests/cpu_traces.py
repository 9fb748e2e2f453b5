"""Traces of the CPU: made by torch.profiler, or written by hand."""

import json
from pathlib import Path


def profiled(path: Path, *, dtype="float32", fused=False, loader=True) -> dict[str, tuple[int, float, float]]:
    """Write a trace of two training steps of a small model; returns the profiler's own count, self and total time (ns) by op."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule
    from torch.utils.data import DataLoader, TensorDataset

    kind, averages = getattr(torch, dtype), {}
    layers = (torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10))
    model = torch.nn.Sequential(*layers).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    data = TensorDataset(torch.randn(32 * 3, 32, dtype=kind), torch.randint(0, 10, (32 * 3,)))
    batches = DataLoader(data, batch_size=32) if loader else [data[32 * n : 32 * n + 32] for n in range(3)]

    def ready(done):
        done.export_chrome_trace(str(path))
        for one in done.key_averages():
            averages[one.key] = (one.count, 1e3 * one.self_cpu_time_total, 1e3 * one.cpu_time_total)

    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True, on_trace_ready=ready) as running:
        for inputs, labels in batches:
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            running.step()
    return averages


def written(path: Path, *events) -> Path:
    """Write a trace of events: (category, name, thread, start in µs, end in µs), and arguments by name."""
    rows = [
        {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start}
        | {"args": dict(arguments)}
        for kind, name, thread, start, end, *arguments in events
    ]
    path.write_text(json.dumps({"traceEvents": rows}))
    return path
