"""Several processes, on one host or many, that train one model together; what they tell each other beside tensors.

They speak through the key-value store of JAX's coordination service, so that nothing is compiled for it.
"""

import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed

from tformer_jax.config import ConfigError, ParallelConfig
from tformer_jax.parallel import lobby
from tformer_jax.parallel.cluster import Place
from tformer_jax.parallel.relay import Relay
from tformer_jax.parallel.watch import FAILED, MISTAKE, Watch

PART = 2**20
"""Characters of one value of the store."""
POLL_SECONDS = 0.1
CONNECT_SECONDS = 60
"""From when all processes have met until JAX has connected them."""


class Alone:
    """The only process: it agrees with itself, and waits for nobody."""

    number, count = 0, 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.number == 0

    def agree(self, name: str, facts: Mapping[str, Any]) -> None:
        """Makes sure that all processes have the same facts.

        Raises:
            ConfigError: one has another; the same sentence in all processes.
        """

    def refuse(self, name: str, problem: str | None) -> None:
        """Raises `ConfigError` in all processes where one has a problem."""
        if problem:
            raise ConfigError(problem)

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        """What process 0 makes, in all processes; a name is used once."""
        return make()

    def barrier(self, name: str, seconds: int | None = None) -> None:
        """Waits until all processes are here; who does not come in time (default: ever) is named, and all end."""

    def stop_here(self, step: int, requested: bool) -> bool:
        """Whether all stop now, `step` steps being done, as one at least was `requested` to; the same in all."""
        return requested

    def rest(self, step: int) -> None:
        """No further step is begun."""


ALONE = Alone()


class Together(Alone):
    """One of several processes."""

    def __init__(self, place: Place, watch: Watch, store: "Store"):
        self.number, self.count = place.process, place.processes
        self._watch, self._store = watch, store
        self._barriers: dict[str, int] = {}

    def agree(self, name: str, facts: Mapping[str, Any]) -> None:
        mine = {key: repr(value) for key, value in facts.items()}
        self._store.put_long(f"facts/{name}/{self.number}", json.dumps(mine))
        first = json.loads(self._store.wait_long(f"facts/{name}/0"))
        difference = self._difference(first, mine)
        self.refuse(name, difference and f"has {difference}; start all the same way")

    def refuse(self, name: str, problem: str | None) -> None:
        self._store.put(f"problem/{name}/{self.number}", problem or "")
        found = self._wait_for_all(f"problem/{name}")
        with_problems = [number for number in sorted(found) if found[number]]
        if with_problems:
            self._watch.expect_end()
        self.barrier(name)
        if with_problems:
            raise ConfigError(f"{self._watch.name(with_problems[0])} {found[with_problems[0]]}")

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        if self.first:
            self._store.put_long(f"first/{name}", make())
        return self._store.wait_long(f"first/{name}")

    def barrier(self, name: str, seconds: int | None = None) -> None:
        self._barriers[name] = self._barriers.get(name, 0) + 1
        place = f"barrier/{name}/{self._barriers[name]}"
        self._store.put(f"{place}/{self.number}", "")
        self._wait_for_all(place, seconds)

    def stop_here(self, step: int, requested: bool) -> bool:
        return self._watch.stop_here(step, requested)

    def rest(self, step: int) -> None:
        self._watch.rest(step)

    def _difference(self, first: Mapping[str, str], mine: Mapping[str, str]) -> str | None:
        for key in sorted(first.keys() | mine.keys()):
            theirs, own = first.get(key, "nothing"), mine.get(key, "nothing")
            if theirs != own:
                return f"{key}={own}, process 0 has {theirs}"
        return None

    def _wait_for_all(self, place: str, seconds: int | None = None) -> dict[int, str]:
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(found := self._store.all(place)) < self.count:
            if deadline is not None and time.monotonic() > deadline:
                absent = ", ".join(self._watch.name(number) for number in range(self.count) if number not in found)
                self._watch.die(f"waited {seconds} s at {place} for {absent}, which did not come")
            time.sleep(POLL_SECONDS)
        return found


class Store:
    """The key-value store of JAX's coordination service."""

    def __init__(self, client: Any):
        self._client = client

    def put(self, key: str, value: str) -> None:
        """Writes a value, over an earlier one."""
        self._client.key_value_set(f"tformer_jax/{key}", value, allow_overwrite=True)

    def all(self, folder: str) -> dict[int, str]:
        """The values below a folder that processes wrote under their numbers."""
        found = self._client.key_value_dir_get(f"tformer_jax/{folder}/")
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def put_long(self, folder: str, value: str) -> None:
        """Writes a value of any length, in parts of which each says how many there are."""
        parts = [value[start : start + PART] for start in range(0, max(len(value), 1), PART)]
        for number, part in enumerate(parts):
            self.put(f"{folder}/{number}", f"{len(parts)} {part}")

    def wait_long(self, folder: str) -> str:
        """What `put_long` wrote, as soon as it is there."""
        while True:
            found = self.all(folder)
            if found and len(found) == int(found[min(found)].partition(" ")[0]):
                return "".join(found[number].partition(" ")[2] for number in sorted(found))
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def start(cfg: ParallelConfig, place: Place | None) -> Iterator[Alone]:
    """Joins the processes of `place` (see `cluster.find`), and leaves them at the end; nothing happens for None.

    No device may have been touched before. What is raised inside ends the other processes, too, with the same words.

    Raises:
        ConfigError: not all processes came, or they cannot reach each other.
    """
    if place is None:
        yield ALONE
        return
    hosts = lobby.meet(place, cfg.start_seconds)
    watch = Watch(place.process, hosts, cfg.lost_seconds)
    relay = None if place.process == 0 else Relay(place, watch.coordinator_lost)
    connect(place, None if relay is None else relay.address, cfg.lost_seconds)
    store = Store(distributed.global_state.client)
    watch.begin(store)
    together = Together(place, watch, store)
    try:
        yield together
        together.barrier("end")
    except BaseException as error:
        if _is_remote(error):
            watch.wait_for_failure()
        reason = " ".join((str(error).splitlines() or [""])[:1]) or type(error).__name__
        watch.end(reason, MISTAKE if isinstance(error, ConfigError) else FAILED)
        _leave_without_goodbye()
        raise
    else:
        watch.end(None)
    finally:
        watch.close()
        if relay is not None:
            relay.close()
    jax.distributed.shutdown()


def connect(place: Place, address: str | None, lost_seconds: int) -> None:
    """Starts JAX's own engine, which notices lost processes later than `Watch` does.

    Args:
        address: where the coordinator is reached, if not at its own address.
    """
    jax.config.update("jax_enable_preemption_service", False)  # `Watch` agrees on the step to stop at
    jax.distributed.initialize(
        coordinator_address=address or place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_SECONDS,
        heartbeat_timeout_seconds=4 * lost_seconds,
        shutdown_timeout_seconds=lost_seconds,
    )


def _is_remote(error: BaseException | None) -> bool:
    """Whether it may come from a collective in which another process was lost."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _leave_without_goodbye() -> None:
    """JAX would wait at exit for the others, which may stand in a collective."""
    state = distributed.global_state
    for engine in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # what is never freed does not complain at exit
    state.client = state.service = None
