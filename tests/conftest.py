"""Settings of all tests, and the record of equivalences."""

import atexit
import gc
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("no deadline", deadline=None)  # machines differ in speed
hypothesis.settings.load_profile("no deadline")

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # eight devices, fast compilation
if importlib.metadata.version("jaxlib").startswith("0.10."):  # halves the time; another version may not know the flag
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
if "PYTEST_XDIST_WORKER" not in os.environ:  # what one test compiled, or made of CLDR's data, serves all workers
    kept = os.environ["TFORMER_CACHE_DIR"] = tempfile.mkdtemp(prefix="tformer_jax_tests_")
    atexit.register(shutil.rmtree, kept, ignore_errors=True)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{kept}/xla"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
gc.set_threshold(200_000, 50, 100)  # traces make many objects that stay

collect_ignore = [] if importlib.util.find_spec("torch") else ["parity"]
if not (importlib.util.find_spec("playwright") and shutil.which("chromium")):
    collect_ignore.append("report/test_page.py")
seen: dict[str, float] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--equivalences", type=Path, metavar="FILE", help="write the largest difference seen for each switch and oracle"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    from tests.helpers import EQUIVALENCES

    mine = {json.dumps(pair): difference for pair, difference in EQUIVALENCES.items()}
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["equivalences"] = mine
        return
    _merge(mine)
    path = session.config.getoption("--equivalences")
    if path:
        rows = [[*json.loads(pair), difference] for pair, difference in sorted(seen.items())]
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def pytest_testnodedown(node, error) -> None:
    _merge(getattr(node, "workeroutput", {}).get("equivalences", {}))


def _merge(differences: dict[str, float]) -> None:
    for pair, difference in differences.items():
        seen[pair] = max(seen.get(pair, 0.0), difference)
