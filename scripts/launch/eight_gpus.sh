#!/usr/bin/env bash
# Trains on all GPUs of one machine, in one process. Parameters and optimizer state are sharded over them (fsdp);
# --config.parallel.preset=dp replicates them instead. Arguments are passed to scripts/train.py:
#   CONFIG=configs/translate_multi30k.py scripts/launch/eight_gpus.sh --data DIR --config.data.batch_tokens=65536
# Run the same command again to resume, also with another number of GPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."

export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
XLA_FLAGS="$(python scripts/xla_flags.py gpu fsdp) ${XLA_FLAGS:-}"
export XLA_FLAGS

exec python scripts/train.py --config "${CONFIG:-configs/translate_cldr.py}" --resume \
  --config.parallel.preset=fsdp --config.data.batch_multiple=8 --config.model.dtype=bfloat16 "$@"
