"""What flopwise answered before a change, and what it answers after: the JSON of many commands, compared value by value.

    git worktree add /tmp/before REVISION
    python benchmarks/same_answers.py record before --source /tmp/before/src --inputs /tmp/before
    python benchmarks/same_answers.py record after --inputs /tmp/before
    python benchmarks/same_answers.py compare before after

Both sides read the same inputs: the traces, runs and ceilings of one checkout. A difference is a corrected error or a defect;
`compare` prints each with its path and exits 1 if there are any. `lab --quick` measures, so only the names and types of its
rows are compared; everything else is compared in full, numbers to nine digits.
"""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
TRACES = "tests/trace/fixtures/h200-small"
RUNS = "benchmarks/results/h200-2026-11"
TUNED = "benchmarks/results/h200-2026-11-tune-final"
FAST = "--precision bf16-master --optimizer flopwise --loss fused --attention sdpa-cudnn"
BY_HAND = "--attention naive --norm eager --activation eager"

COMMANDS = f"""
account tiny
account small --gpu h200
account small --gpu h100,h200,a100 {BY_HAND}
account medium --batch 16 --context 1024 --precision bf16 --gpu h200
account large --checkpoint 2 --precision bf16 --gpu h100
account xl --compile blocks --graph on {FAST} --gpu h200
account 2.7B --gpu h200
account 2.7B --batch 16 --context 1024 --compile default {FAST} --gpu h200
account 2.7B --overlap on --precision bf16 --optimizer flopwise --gpu h200
account llama3-8b --precision bf16 --gpu h100 --loss chunked --projections fused
account llama3-70b --gpu h100 --gpus 1024 --tokens 15T
account gpt2 --inference --precision bf16 --gpu h100
account llama3.2-1b --phase forward --precision tf32 --gpu a100
account small --measured 24ms --gpu h200
account medium --optimizer-bits 8 --gpu h200
account small --optimizer adamw-loop --attention flex --gpu h200
account hf:config.json --gpu h100
account hf:config.json --implementation transformers --gpu h100
account op:attention --gpu h200
account op:mlp --gpu h100
account py:own_steps:make_step --gpu h200
roofline small --gpu h200
roofline 2.7B --gpu h200 {FAST} --compile default
roofline llama3-8b --gpu h100 --precision bf16 --phase forward
roofline py:own_steps:make_step --gpu h200
roofline {TRACES}-fp32-naive-2steps.kineto.json.gz
roofline {TRACES}-bf16-compiled-2steps.kineto.json.gz
roofline {TUNED}/small-16x1024/traces/after.kineto.json.gz
memory tiny --predict --gpu h200
memory small --predict --gpu h200 {BY_HAND}
memory small --predict --gpu cpu
memory medium --predict --gpu h100 --precision bf16 --checkpoint 1
memory 2.7B --predict --gpu h200 {FAST}
memory llama3.2-1b --predict --gpu a100 --precision bf16 --loss chunked
memory op:attention --predict --gpu h200
memory py:own_steps:make_step --predict --gpu h200
memory hf:config.json --implementation transformers --predict --gpu h100 --precision bf16
memory snapshot.pickle
explain {TRACES}-fp32-naive-2steps.kineto.json.gz
explain {TRACES}-fp32-naive-2steps.nsys.sqlite.gz
explain {TRACES}-bf16-compiled-2steps.kineto.json.gz
explain {TRACES}-bf16-compiled-2steps.kineto.json.gz --gpu h100
explain {TRACES}-fp32-naive-2steps.kineto.json.gz {TRACES}-fp32-naive-2steps.nsys.sqlite.gz
explain {TRACES}-bf16-compiled-2steps.kineto.json.gz --against {TRACES}-fp32-naive-2steps.kineto.json.gz
explain {TUNED}/small-16x1024/traces/after.kineto.json.gz
explain {TUNED}/large-16x1024/traces/after.kineto.json.gz
explain given/tl_h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz
explain given/tl_mi300_ddp_train_resnet18.json.gz
explain given/param_linear_kineto.json.gz
explain given/tl_vllm_prefilldecode_piecewise_graph_execution.json.gz
compare {RUNS}/course-compile {RUNS}/course-end-to-end
compare {RUNS}/course-compile {RUNS}/course-end-to-end --phase backward --clock gpu
compare {RUNS}/course-end-to-end {RUNS}/course-end-to-end
compare {RUNS}/prediction {RUNS}/prediction-held-out
runs show {TUNED}/small-4x512
runs show {TUNED}/2.7B-16x1024
runs show {RUNS}/course-attention
runs show {RUNS}/prediction-memory
runs show {RUNS}/overlap-medium
runs show {RUNS}/lab
runs show {RUNS}/lab-again
runs show {RUNS}/lab-warmup
report {TRACES}-fp32-naive-2steps.kineto.json.gz
report {TRACES}-bf16-compiled-2steps.kineto.json.gz {TUNED}/small-4x512
report {RUNS}/course-attention {RUNS}/launch-bound {RUNS}/lab
report snapshot.pickle
lab all --quick --device cpu
doctor
"""
STEP = """
import torch

def make_step(device):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0), 2)
    model, head = model.to(device), torch.nn.Linear(64, 1000).to(device)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], fused=False)
    x, y = torch.randn(8, 32, 64, device=device), torch.randint(1000, (8, 32), device=device)
    state = {}

    def forward():
        optimizer.zero_grad()
        state["loss"] = torch.nn.functional.cross_entropy(head(model(x)).flatten(0, 1), y.flatten())
        return state["loss"]

    def backward():
        state["loss"].backward()

    return {"forward": forward, "backward": backward, "optimizer": optimizer.step}
"""
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu", "max_position_embeddings": 2048,
}  # fmt: skip
VOLATILE = re.compile(r"seconds|_at$|^id$|^run$|elapsed|free_bytes|load")  # of the moment, not of the answer
DIGITS = 1e-9


def record(answers: Path, source: Path, inputs: Path, given: Path, only: str) -> None:
    """Every command's answer as a file in `answers`."""
    answers.mkdir(parents=True, exist_ok=True)
    (inputs / "own_steps.py").write_text(STEP)
    (inputs / "config.json").write_text(json.dumps(CONFIG))
    if not (inputs / "snapshot.pickle").exists():
        make = [sys.executable, str(HERE / "tests/snapshot/gen_snapshot.py"), "snapshot.pickle", "--events", "20000"]
        subprocess.run(make, cwd=inputs, check=True)
    if given.exists() and not (inputs / "given").exists():
        (inputs / "given").symlink_to(given)
    chosen = [line for line in COMMANDS.strip().splitlines() if re.search(only, line)]
    with ThreadPoolExecutor(2) as pool:
        for line, code, seconds in pool.map(lambda line: _run(line, answers, source, inputs), chosen):
            print(f"{seconds:6.1f} s  exit {code}  {line}", flush=True)


def _run(line: str, answers: Path, source: Path, inputs: Path) -> tuple[str, int, float]:
    import time

    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": f"{source}:{inputs}", "FLOPWISE_CEILINGS": str(inputs / "no-ceilings")}
    env |= {"FLOPWISE_RUNS": str(answers / "runs"), "COLUMNS": "100", "NO_COLOR": "1"}
    out = answers / (re.sub(r"[^\w.=,-]+", "_", line)[:150] + (".md" if line.startswith("report") else ".json"))
    words = [*shlex.split(line), "-o", str(out.resolve())]
    words += [] if line.startswith("report") else ["--format", "json"]
    if line.startswith(("lab",)):
        words.append("--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "flopwise", *words], cwd=inputs, env=env, capture_output=True, text=True
    )
    (answers / f"{out.name}.exit").write_text(f"{done.returncode}\n{done.stderr if done.returncode == 2 else ''}")
    return line, done.returncode, time.monotonic() - began


def differences(a: Any, b: Any, path: str = "", types_only: bool = False) -> Iterator[str]:
    """Every place where two documents differ, with its path."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            if VOLATILE.search(key):
                continue
            if key not in a or key not in b:
                yield f"{path}.{key}: only {'after' if key in b else 'before'}"
            else:
                yield from differences(a[key], b[key], f"{path}.{key}", types_only or key == "rows")
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b) and not types_only:
            yield f"{path}: {len(a)} items before, {len(b)} after"
        for n, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from differences(one, other, f"{path}[{n}]", types_only)
    elif types_only:
        numbers = (int, float)
        if not (type(a) is type(b) or (isinstance(a, numbers) and isinstance(b, numbers)) or None in (a, b)):
            yield f"{path}: {type(a).__name__} before, {type(b).__name__} after"
    elif isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        if not math.isclose(a, b, rel_tol=DIGITS) and not (math.isnan(a) and math.isnan(b)):
            yield f"{path}: {a!r} before, {b!r} after"
    elif a != b:
        yield f"{path}: {str(a)[:150]!r} before, {str(b)[:150]!r} after"


def _document(path: Path) -> Any:
    """JSON as it is; of Markdown the numbers of every table row, since its words may change."""
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [" ".join(re.findall(r"\d[\d.,]*", re.sub(r"`[^`]*`", "", row))) for row in rows]


def compare(before: Path, after: Path, most: int, ignore: str) -> int:
    """How many of the answers differ."""
    count = 0
    for one in sorted(before.glob("*.exit")):
        name = one.name.removesuffix(".exit")
        if not (after / one.name).exists():
            print(f"{name}: no answer after")
            count += 1
            continue
        found = list(differences(one.read_text().split("\n")[0], (after / one.name).read_text().split("\n")[0], "exit"))
        if (before / name).exists() and (after / name).exists():
            found += differences(_document(before / name), _document(after / name), "", name.startswith("lab"))
        found = [line for line in found if not (ignore and re.search(ignore, line))]
        count += bool(found)
        if found:
            print(f"\n{name}: {len(found)} differences")
            print(*(f"    {line}" for line in found[:most]), sep="\n")
    print(f"\n{count} of {len(list(before.glob('*.exit')))} answers differ")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("record")
    one.add_argument("answers", type=Path)
    one.add_argument("--source", type=Path, default=HERE / "src", help="the flopwise that answers")
    one.add_argument("--inputs", type=Path, default=HERE, help="a checkout whose traces and runs are read")
    one.add_argument("--given", type=Path, default=HERE.parent / "shared/fixtures/public", help="traces of others")
    one.add_argument("--only", default="", help="commands that match this pattern")
    two = verbs.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.add_argument("--most", type=int, default=12, help="differences shown per answer")
    two.add_argument("--ignore", default="", help="leave out differences that match this pattern")
    asked = parser.parse_args()
    if asked.verb == "record":
        record(asked.answers, asked.source.resolve(), asked.inputs.resolve(), asked.given.resolve(), asked.only)
    else:
        sys.exit(1 if compare(asked.before, asked.after, asked.most, asked.ignore) else 0)


if __name__ == "__main__":
    main()
