#!/usr/bin/env bash
# Trains on one GPU. Further flags go to scripts/train.py:
#   CONFIG=configs/translate_multi30k.py scripts/launch/one_gpu.sh --data DIR --config.train.steps=5000
# The same command goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."

export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 # of the GPU's memory; JAX's own 0.75 leaves a quarter unused

exec python scripts/train.py --config "${CONFIG:-configs/translate_cldr.py}" --resume \
  --config.model.dtype=bfloat16 "$@"
