#!/usr/bin/env bash
# Trains on one GPU. Arguments are passed to scripts/train.py:
#   CONFIG=configs/translate_multi30k.py scripts/launch/one_gpu.sh --data DIR --config.train.steps=5000
# Run the same command again to resume.
set -euo pipefail
cd "$(dirname "$0")/../.."

export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}"
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 # JAX's default of 0.75 leaves a quarter of the GPU's memory unused

exec python scripts/train.py --config "${CONFIG:-configs/translate_cldr.py}" --resume \
  --config.model.dtype=bfloat16 "$@"
