"""Carries the bytes between JAX in this process and the coordinator in process 0.

When its connection breaks, JAX ends the process at once with a page of C++ stack. Behind a relay it never breaks: that
the coordinator is gone is said in one sentence instead.
"""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

from tformer_jax.parallel.cluster import Place

CHUNK = 2**16


class Relay:
    """Listens at a port of this machine; whatever connects there speaks with the coordinator."""

    def __init__(self, place: Place, lost: Callable[[], None]):
        """`lost` is called, in another thread, when the coordinator hangs up."""
        self._place, self._lost = place, lost
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._over = threading.Event()
        threading.Thread(target=self._accept, daemon=True, name="relay").start()

    def close(self) -> None:
        """From now on the coordinator may hang up."""
        self._over.set()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(self._place.address, timeout=10)
            except OSError:  # it does not listen yet; JAX tries again
                near.close()
                continue
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._carry, args=(near, far), daemon=True, name="relay").start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as both:
            both.register(near, selectors.EVENT_READ, far)
            both.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in both.select():
                    source, target = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    found = b""
                    with contextlib.suppress(OSError):
                        found = source.recv(CHUNK)
                        target.sendall(found)
                    if found:
                        continue
                    if source is far and not self._over.is_set():
                        self._lost()
                    near.close()
                    far.close()
                    return
