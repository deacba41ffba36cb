#!/usr/bin/env bash
# Orbax 0.12.8: each save of a CheckpointManager leaves about 0.06 MB in memory for a tree of 100 small arrays.
#
# The arrays have 26 kB together, at most two checkpoints are kept, and every save is waited for. Garbage is collected
# and free memory is returned to the system before each measurement. A run with 10,000 checkpoints grows by 0.6 GB.
#
# Seen after 100, 200 and 300 saves: 274, 280 and 287 MB. It takes some minutes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2
JAX_PLATFORMS=cpu "$folder/env/bin/python" - "$folder" <<'PYTHON' 2>"$folder/log" || { tail -20 "$folder/log"; exit 1; }
import ctypes
import gc
import importlib.metadata
import os
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp


def resident_megabytes():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


print("orbax-checkpoint", importlib.metadata.version("orbax-checkpoint"))
tree = {f"array {i}": jnp.ones((8, 8)) for i in range(100)}
manager = ocp.CheckpointManager(f"{sys.argv[1]}/checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2))
sizes = {}
for step in range(1, 301):
    manager.save(step, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    if step % 100 == 0:
        sizes[step] = resident_megabytes()
        print(f"after {step} saves: {sizes[step]:.0f} MB")
growth = (sizes[300] - sizes[100]) / 200
print(f"growth: {growth:.3f} MB a save")
assert 0.03 < growth < 0.3, "the behaviour has changed"
PYTHON
