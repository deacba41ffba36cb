#!/usr/bin/env bash
# ml_dtypes 0.7.0 takes 0.4 s to import, about 50 times as long as 0.6.0: two thirds of the time of `import jax`, which
# imports it at each start.
#
# The module of 0.7.0 registers promoters and loops of all pairs of its types at NumPy's ufuncs. NumPy compares each new
# one with all earlier ones (PyUFunc_AddLoop): 94 % of 7.6 billion instructions, counted by callgrind, of a process that
# only imports ml_dtypes. It is time of the CPU, in every process, with the files in memory.
#
# Exits with 1 if 0.7.0 takes less than 10 times as long. Seen on 2 CPU cores (AMD Zen 5), numpy 2.4.6, jax 0.10.2:
#   ml_dtypes 0.6.0: 0.007 s, and jax 0.22 s
#   ml_dtypes 0.7.0: 0.391 s, and jax 0.58 s
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.4.6 jax==0.10.2 ml_dtypes==0.6.0
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/0.6.0" ml_dtypes==0.6.0
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/0.7.0" ml_dtypes==0.7.0
cat > "$folder/measure.py" <<'PYTHON'
import os
import statistics
import subprocess
import sys

PROGRAM = """
import time
import numpy
start = time.process_time()
import ml_dtypes
middle = time.process_time()
import jax
print(ml_dtypes.__version__, middle - start, time.process_time() - start)
"""


def seconds(folder: str, version: str) -> tuple[float, float]:
    """Returns the medians over five processes of the CPU time of `import ml_dtypes`, and of that and `import jax`."""
    environment = os.environ | {"PYTHONPATH": f"{folder}/{version}"}
    lines = [subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True) for _ in range(6)]
    rows = [line.split() for line in lines[1:]]  # the first writes bytecode
    assert {row[0] for row in rows} == {version}
    return statistics.median(float(row[1]) for row in rows), statistics.median(float(row[2]) for row in rows)


times = {version: seconds(sys.argv[1], version) for version in ("0.6.0", "0.7.0")}
for version, (own, with_jax) in times.items():
    print(f"ml_dtypes {version}: {own:.3f} s, and jax {with_jax:.2f} s")
raise SystemExit(times["0.7.0"][0] < 10 * times["0.6.0"][0])
PYTHON
"$folder/venv/bin/python" "$folder/measure.py" "$folder"
