"""Where processes meet before JAX starts: whoever does not come in time, or comes wrongly, is named.

JAX's own start ends a process without a word of who is missing. Process 0 listens at the coordinator's address, the
others announce themselves there; once all have come, the port is free for JAX.
"""

import contextlib
import json
import socket
import time
from typing import Any

from tformer_jax.config import ConfigError
from tformer_jax.parallel import cluster
from tformer_jax.parallel.cluster import Place

RETRY_SECONDS = 0.2
HELLO = "tformer_jax"


def meet(place: Place, seconds: int) -> list[str]:
    """Waits for all processes; the name of each one's host.

    Raises:
        ConfigError: not all came within `seconds`, the coordinator cannot be reached, the port is in use, or the
            numbers of the processes contradict each other.
    """
    return _receive(place, seconds) if place.process == 0 else _announce(place, seconds)


def _receive(place: Place, seconds: int) -> list[str]:
    deadline = time.monotonic() + seconds
    names, waiting = {0: socket.gethostname()}, dict[int, socket.socket]()
    with _listening(place) as server, contextlib.ExitStack() as connections:
        while len(names) < place.processes:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = _missing(place, names, seconds)
                for connection in waiting.values():
                    _say(connection, {"problem": missing})
                raise ConfigError(missing) from None
            connections.enter_context(connection)
            hello = _hear(connection, RETRY_SECONDS * 10)
            if hello is None or hello.get("hello") != HELLO:
                continue  # it is no process of ours
            problem = _contradiction(place, names, hello)
            if problem:
                _say(connection, {"problem": problem})
                continue
            names[hello["process"]], waiting[hello["process"]] = hello["host"], connection
        found = [names[number] for number in range(place.processes)]
        for connection in waiting.values():
            _say(connection, {"hosts": found})
    return found


def _announce(place: Place, seconds: int) -> list[str]:
    deadline, reason = time.monotonic() + seconds, "no answer"
    hello = {"hello": HELLO, "process": place.process, "processes": place.processes, "host": socket.gethostname()}
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(place.address, timeout=left)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(RETRY_SECONDS)
            continue
        with connection:
            _say(connection, hello)
            answer = _hear(connection, max(deadline - time.monotonic(), 0) + RETRY_SECONDS * 10)
        if answer is not None and "hosts" in answer:
            hosts: list[str] = answer["hosts"]
            return hosts
        if answer is not None and "problem" in answer:
            raise ConfigError(answer["problem"])
        reason = "it hung up"
        time.sleep(RETRY_SECONDS)
    raise ConfigError(
        f"process {place.process} could not reach process 0 at {place.coordinator} within {seconds} s ({reason}); "
        "start it there, and let its port through, or write its address as --coordinator HOST:PORT"
    )


def _listening(place: Place) -> socket.socket:
    port = place.address[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen at port {port} ({error.strerror}); write another one in --coordinator HOST:PORT "
            "of all processes"
        ) from error


def _contradiction(place: Place, names: dict[int, str], hello: dict[str, Any]) -> str | None:
    number, host = hello["process"], hello["host"]
    if hello["processes"] != place.processes:
        return (
            f"process {number} (host {host}) was started with --processes {hello['processes']}, process 0 with "
            f"{place.processes}; start all with the same number"
        )
    if number in names:
        return (
            f"two processes were started as --process {number}, on the hosts {names[number]} and {host}; give each "
            f"its own number from 0 to {place.processes - 1}"
        )
    return None


def _missing(place: Place, names: dict[int, str], seconds: int) -> str:
    absent = [number for number in range(place.processes) if number not in names]
    shown = ", ".join(map(str, absent[:20])) + (f" and {len(absent) - 20} more" if len(absent) > 20 else "")
    came = ", ".join(f"{number} (host {host})" for number, host in sorted(names.items())[:20])
    listed = cluster.hosts()
    return (
        f"of {place.processes} processes, {shown} did not come to {place.coordinator} within {seconds} s "
        f"(parallel.start_seconds); there {'is' if len(names) == 1 else 'are'} {came}"
        + (f"; the hosts of this job are {listed}" if listed else "")
        + "; look there for why"
    )


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket, seconds: float) -> dict[str, Any] | None:
    """One line of JSON; None where there comes none."""
    connection.settimeout(seconds)
    try:
        with connection.makefile(encoding="utf-8") as lines:
            found = json.loads(lines.readline(2**20))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
