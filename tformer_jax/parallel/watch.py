"""A thread that tells the other processes that this one lives, and ends it when one of them does not."""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

FAILED, MISTAKE = 1, 2
"""Exit status of a process that ends because another one did: of itself, or for a user's mistake."""
RESUME = "the same commands with --resume go on from the last checkpoint"


@dataclasses.dataclass
class Sign:
    """What a process says of itself at every beat."""

    beat: int = 0
    steps: int | None = None
    """Steps that it had begun when it heard that all are to stop; None: it has not heard that."""
    over: bool = False
    """It is about to end."""
    failure: str | None = None
    """Why, unless all is well."""
    status: int = FAILED


class Watch:
    """Beats, listens to the beats of the others, and agrees with them on the step at which all stop.

    JAX notices a lost process, too; but it ends this one with a page of C++ stack.
    """

    def __init__(self, number: int, hosts: Sequence[str], seconds: int):
        self._number, self._hosts, self._seconds = number, hosts, seconds
        self.interval = min(max(0.5, len(hosts) / 50), seconds / 6)
        self._mine, self._lock = Sign(), threading.Lock()
        self._begun = 0
        self._requested = False
        self._signs: dict[int, Sign] = {}
        self._closed = threading.Event()

    def begin(self, store: Any) -> None:
        """Starts to beat, and to listen, through a key-value store."""
        self._store = store
        self._turn = time.monotonic()
        self._heard = dict.fromkeys(range(len(self._hosts)), self._turn)
        for target in (self._beat, self._guard):
            threading.Thread(target=target, daemon=True, name="watch").start()

    def stop_here(self, step: int, requested: bool) -> bool:
        """Whether all processes stop before the next step, `step` of which are begun; True at the same in all.

        No process waits for another one: each names the steps it had begun when it heard of the request, and the
        largest of these numbers is where all stop. Only who has come so far waits for those numbers.
        """
        with self._lock:
            self._requested |= requested
            if self._mine.steps is None:
                self._begun = step + 1
                return False
        while (last := self._last_step()) is None:
            time.sleep(self.interval / 10)
        return step >= last

    def rest(self, step: int) -> None:
        """No further step is begun."""
        with self._lock:
            if self._mine.steps is None:
                self._begun = step

    def name(self, number: int) -> str:
        """A process and its host, in words."""
        return f"process {number} (host {self._hosts[number]})"

    def expect_end(self) -> None:
        """All processes are about to end, each for a reason that it knows."""
        with self._lock:
            self._mine.over = True

    def end(self, failure: str | None, status: int = FAILED) -> None:
        """Tells the others that this process ends, and why.

        Process 0, which carries their words, waits until all others end, too.
        """
        with self._lock:
            self._mine.over, self._mine.failure, self._mine.status = True, failure, status
        self._tell_briefly()
        deadline = time.monotonic() + self._seconds
        while self._number == 0 and time.monotonic() < deadline:
            others = [number for number in range(len(self._hosts)) if number != self._number]
            if all(number in self._signs and self._signs[number].over for number in others):
                break
            time.sleep(self.interval / 10)

    def wait_for_failure(self) -> None:
        """What went wrong here may be the fault of a process that is lost: gives the watch time to end this one."""
        time.sleep(self._seconds + 3 * self.interval)

    def close(self) -> None:
        """Stops beating and listening."""
        self._closed.set()

    def coordinator_lost(self) -> None:
        """Ends this process unless process 0 said that it would go."""
        time.sleep(self.interval / 2)
        with self._lock:
            if self._mine.over or self._closed.is_set():
                return
        zero = self._signs.get(0, Sign())
        self.die(f"{self.name(0)} ended: {zero.failure}" if zero.failure else f"{self.name(0)} is lost; {RESUME}")

    def die(self, sentence: str, status: int = FAILED) -> NoReturn:
        """Ends this process with a sentence; its main thread may stand in a collective that never returns."""
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self._closed.set()
        with self._lock:
            self._mine.over, self._mine.failure, self._mine.status = True, sentence, status
        self._tell_briefly()
        if self._number == 0:  # the others hear of it before their coordinator goes
            time.sleep(3 * self.interval)
        os._exit(status)

    def _tell_briefly(self) -> None:
        """Nobody may be there to answer."""
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(self.interval)

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._tell()
            if self._listen():
                self._turn = time.monotonic()
                self._look()
            self._closed.wait(self.interval)

    def _tell(self) -> None:
        with self._lock:
            self._mine.beat += 1
            said = json.dumps(dataclasses.asdict(self._mine))
        with contextlib.suppress(Exception):  # the coordinator is gone, or does not answer: `_guard` ends this process
            self._store.put(f"sign/{self._number}", said)

    def _listen(self) -> bool:
        """Whether the coordinator answered."""
        try:
            found = self._store.all("sign")
        except Exception:  # whatever JAX raises when it does not
            return False
        now = time.monotonic()
        for number, said in found.items():
            sign = Sign(**json.loads(said))
            if number not in self._signs or self._signs[number].beat != sign.beat:
                self._heard[number] = now
            self._signs[number] = sign
        if self._requested or any(sign.steps is not None for sign in self._signs.values()):
            with self._lock:
                if self._mine.steps is None:
                    self._mine.steps = self._begun
        return True

    def _look(self) -> None:
        for number, sign in self._signs.items():
            if number != self._number and sign.failure and not self._mine.over:
                known = sign.failure.endswith(RESUME)
                self.die(sign.failure if known else f"{self.name(number)} ended: {sign.failure}", sign.status)
        now = time.monotonic()
        lost = [
            self.name(number)
            for number, heard in self._heard.items()
            if number != self._number
            and now - heard > self._seconds
            and not (number in self._signs and self._signs[number].over)
        ]
        if lost:
            self.die(self._lost(lost))

    def _lost(self, names: Sequence[str]) -> str:
        is_lost = "is lost: nothing was heard of it" if len(names) == 1 else "are lost: nothing was heard of them"
        return f"{' and '.join(names)} {is_lost} for {self._seconds} s (parallel.lost_seconds); {RESUME}"

    def _guard(self) -> None:
        """Nothing that the coordinator does, or leaves, holds this thread."""
        while not self._closed.wait(self.interval):
            if time.monotonic() - self._turn > self._seconds + 2 * self.interval and not self._mine.over:
                self.die(self._lost([self.name(0)]))

    def _last_step(self) -> int | None:
        """The step at which all stop; None while some have not said how far they are."""
        steps = [self._signs[number].steps if number in self._signs else None for number in range(len(self._hosts))]
        known = [step for step in steps if step is not None]
        return max(known) if len(known) == len(steps) else None
