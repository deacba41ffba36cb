"""Settings of all tests."""

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import tempfile

import hypothesis

hypothesis.settings.register_profile("no deadline", deadline=None)  # machines differ in speed
hypothesis.settings.load_profile("no deadline")

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # eight devices, fast compilation
if importlib.metadata.version("jaxlib").startswith("0.10."):  # halves the time; another version may not know the flag
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("COLUMNS", None)  # 80 in workers of pytest-xdist
if "PYTEST_XDIST_WORKER" not in os.environ:  # what one test compiled, or made of CLDR's data, serves all workers
    cache = os.environ["TFORMER_CACHE_DIR"] = tempfile.mkdtemp(prefix="tformer_jax_tests_")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{cache}/xla"
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs, and then by children
gc.set_threshold(200_000, 50, 100)  # traces make many objects that stay

collect_ignore = [] if importlib.util.find_spec("torch") else ["parity"]
if not (importlib.util.find_spec("playwright") and shutil.which("chromium")):
    collect_ignore.append("report/test_page.py")


def pytest_sessionfinish() -> None:
    """Excludes what the tests left from the collections at exit, which would take seconds."""
    gc.freeze()
