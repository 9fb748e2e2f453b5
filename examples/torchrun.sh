#!/usr/bin/env bash
# A training script under flopwise, one rank for every GPU of this machine:   examples/torchrun.sh train.py ARGS…
# RANKS=2 sets their number, as on a machine without GPUs (backend gloo).
set -euo pipefail
exec torchrun --standalone --nproc-per-node "${RANKS:-gpu}" -m flopwise run "$@"
