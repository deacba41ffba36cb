"""Settings that every test shares."""

import importlib.util
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

collect_ignore = [] if importlib.util.find_spec("torch") else ["parity"]
