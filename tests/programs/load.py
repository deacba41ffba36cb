"""Load test with many simultaneous clients, some of them misbehaving; checks each client's outputs.

python -m tests.programs.load --record tests/programs/load.json
python -m tests.programs.load --run runs/translate_cldr_en_de
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests import commands

SHARES = {
    "whole": 0.38,
    "streamed": 0.25,
    "slow reader": 0.05,
    "killed": 0.15,
    "oversized": 0.05,
    "malformed": 0.07,
    "slow sender": 0.05,
}
MAX_BODY, BODY_TIMEOUT, QUEUE = 20_000, 1, 32
REFUSED = {"oversized": 413, "malformed": 400, "slow sender": 408}
HELD = ("tformer_pages_used", "tformer_requests_running", "tformer_requests_waiting")
TOKENS = "tformer_tokens_generated_total"
JSON = {"Content-Type": "application/json"}
PATIENCE = (0.05, 0.5, 5.0)
"""Mean seconds after which an impatient client disconnects."""
GROWTH = 1.05
"""Maximum ratio of the mean memory in the last quarter of the run to that in the first."""
TEXTS = {
    "decoder_lm": ["def ", "import os", "class A:", "for i in", "x = [", "# ", "return ", "with open(", "if not ", "a"],
    "seq2seq": ["in 2 weeks", "3:33 PM", "March 3, 2026", "1.5 million", "Sep 5", "UAH265.00", "12%", "now", "Monday"],
}


class Load:
    """The clients of one server, and what they received."""

    def __init__(self, url: str, pid: int, family: str, draw: random.Random) -> None:
        self.pid, self.draw = pid, draw
        self.route = "/translate" if family == "seq2seq" else "/v1/completions"
        self.family = family
        limits = httpx.Limits(max_connections=None)
        self.url = httpx.URL(url)
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.retries = 0
        self.seconds: list[float] = []
        self.first: list[float] = []
        self.memory: list[float] = []
        self.ask: dict[str, Callable[[dict, Any], Awaitable[None]]] = {
            "whole": self.whole,
            "streamed": self.streamed,
            "slow reader": self.slow_reader,
            "killed": self.killed,
            "oversized": self.oversized,
            "malformed": self.malformed,
            "slow sender": self.slow_sender,
        }

    def bodies(self) -> list[dict[str, Any]]:
        """Returns requests that differ in text, length, strategy, seed and number of outputs."""
        texts = TEXTS[self.family]
        if self.family == "seq2seq":
            return [{"text": text, "n_best": n, "max_new_tokens": m} for text in texts for n in (1, 2) for m in (5, 30)]
        sampled = [
            {"prompt": text, "temperature": 1.0, "seed": seed, "n": 1 + seed % 2, "max_tokens": 8 + 8 * seed}
            for text in texts
            for seed in range(3)
        ]
        return sampled + [{"prompt": text, "temperature": 0, "max_tokens": 20} for text in texts]

    async def expect(self, bodies: Sequence[dict]) -> list[Any]:
        """Computes the output of each request without other clients."""
        return [self.outputs(await self.polite(body)) for body in bodies]

    async def run(self, requests: int, clients: int) -> None:
        """Draws requests of each kind, and lets the clients send them."""
        bodies = self.bodies()
        pairs = list(zip(bodies, await self.expect(bodies), strict=True))
        kinds = [kind for kind, share in SHARES.items() for _ in range(round(share * requests))]
        kinds += ["whole"] * (requests - len(kinds))
        self.draw.shuffle(kinds)
        work = [(kind, *self.draw.choice(pairs)) for kind in kinds[:requests]]
        await asyncio.gather(*(self.one_client(work) for _ in range(clients)))

    async def one_client(self, work: list[tuple[str, dict, Any]]) -> None:
        """Sends all requests."""
        while work:
            kind, body, expected = work.pop()
            try:
                await self.ask[kind](body, expected)
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__} {error}")
            self.done[kind] += 1
            self.memory.append(resident(self.pid))

    async def whole(self, body: dict, expected: Any) -> None:
        started = time.perf_counter()
        actual = await self.polite(body)
        self.seconds.append(time.perf_counter() - started)
        self.compare("whole", body, self.outputs(actual), expected)

    async def streamed(self, body: dict, expected: Any, pause: float = 0.0) -> None:
        started = time.perf_counter()
        actual: dict[int, str] = {}
        async with await self.open(body) as response:
            async for piece in pieces(response):
                if not actual and not pause:
                    self.first.append(time.perf_counter() - started)
                await asyncio.sleep(pause)
                for part in [piece] if self.family == "seq2seq" else piece["choices"]:
                    place = part["rank" if self.family == "seq2seq" else "index"]
                    actual[place] = actual.get(place, "") + part["text"]
        self.compare("streamed", body, [actual[place] for place in sorted(actual)], expected)

    async def slow_reader(self, body: dict, expected: Any) -> None:
        await self.streamed(body, expected, pause=0.05)

    async def killed(self, body: dict, expected: Any) -> None:
        """Disconnects after some pieces, or at a random moment before the first one."""
        if self.draw.random() < 0.5:
            async with await self.open(body) as response:
                left = self.draw.randint(1, 6)
                async for _ in response.aiter_raw():
                    left -= 1
                    if left == 0:
                        return
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.draw.expovariate(1 / self.draw.choice(PATIENCE))):
                await self.polite(body)

    async def oversized(self, body: dict, expected: Any) -> None:
        body = {**body, "prompt" if "prompt" in body else "text": "x" * MAX_BODY}
        response = await self.client.post(self.route, json=body)
        self.refused("oversized", response.status_code, response.text)

    async def malformed(self, body: dict, expected: Any) -> None:
        raw = json.dumps(body).encode()
        broken = [raw[:-1], b"\xff" + raw, b'{"n": NaN}', b"[" * 9000, raw.replace(b'": ', b'x": ', 1)]
        response = await self.client.post(self.route, content=self.draw.choice(broken), headers=JSON)
        self.refused("malformed", response.status_code, response.text)

    async def slow_sender(self, body: dict, expected: Any) -> None:
        """Sends one byte of the body, and waits."""
        reader, writer = await asyncio.open_connection(self.url.host, self.url.port)
        head = f"POST {self.route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        answer = (await reader.read()).decode()
        writer.close()
        self.refused("slow sender", int(answer.split()[1]), answer)

    async def polite(self, body: dict) -> dict:
        """Returns the JSON response; retries while the queue is full."""
        async with await self.open(body, stream=False) as response:
            return json.loads(await response.aread())

    async def open(self, body: dict, stream: bool = True) -> Any:
        """Opens a response of status 200; retries while the queue is full."""
        while True:
            request = self.client.build_request("POST", self.route, json={**body, "stream": stream})
            response = await self.client.send(request, stream=True)
            if response.status_code == 200:
                return Closing(response)
            text = (await response.aread()).decode()
            if response.status_code != 429:
                raise AssertionError(f"status {response.status_code}: {text}")
            self.retries += 1
            await asyncio.sleep(self.draw.uniform(0.1, 1) * float(response.headers["Retry-After"]))

    def outputs(self, actual: dict) -> list[str]:
        if self.family == "seq2seq":
            return [each["text"] for each in actual["translations"][0]]
        return [each["text"] for each in actual["choices"]]

    def compare(self, kind: str, body: dict, actual: Any, expected: Any) -> None:
        if actual != expected:
            self.wrong.append(f"{kind}: {body} gave {actual} instead of {expected}")

    def refused(self, kind: str, status: int, text: str) -> None:
        if status != REFUSED[kind]:
            self.wrong.append(f"{kind}: status {status}: {text}")

    async def metrics(self) -> dict[str, float]:
        """Returns the engine's metrics."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.split()[0] in (*HELD, TOKENS)}

    async def settle(self) -> dict[str, float]:
        """Returns the resources that the engine holds after all requests are done."""
        for _ in range(100):
            actual = await self.metrics()
            if not any(actual[name] for name in HELD):
                break
            await asyncio.sleep(0.1)
        await self.client.aclose()
        return {name: actual[name] for name in HELD}


class Closing:
    """A streamed response that is closed at the end of an `async with` block."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response

    async def __aenter__(self) -> httpx.Response:
        return self.response

    async def __aexit__(self, *_: object) -> None:
        await self.response.aclose()


async def pieces(response: httpx.Response):
    """Yields the events of a stream, which must end with [DONE]."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            piece = json.loads(line.removeprefix("data: "))
            assert "error" not in piece, piece
            yield piece
    raise AssertionError("the stream broke off")


def main() -> None:
    """Prints and records the results; exits with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run folder; without it, a tiny language model is trained first")
    parser.add_argument("--fake", choices=list(TEXTS), help="the engine of the tests instead of a real one")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        actual = measure(options, Path(folder))
    print(json.dumps(actual, indent=1))
    if options.record:
        commands.write_record(options.record, "tests.programs.load", seed=options.seed, **actual)
    raise SystemExit(0 if actual["passed"] else 1)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts the server, loads it, and stops it."""
    errors = folder / "errors.txt"
    with errors.open("w") as stderr:
        process = commands.start(server(options, folder), folder / "cache", stderr=stderr)
        line = next((line for line in process.stdout if " at " in line), None)
        if line is None:
            raise SystemExit(errors.read_text())
        url = line.split(" at ")[1].split(";")[0]
        family = httpx.get(f"{url}/health").json()["family"]
        actual = asyncio.run(loaded(Load(url, process.pid, family, random.Random(options.seed)), options))
        process.terminate()
        status = process.wait(60)
    actual |= {"server": {"status": status, "errors": errors.read_text().splitlines()[:20]}}
    flat = actual["memory_mib"]["last_quarter"] <= GROWTH * actual["memory_mib"]["first_quarter"]
    clean = not (actual["wrong"] or any(actual["at_the_end"].values()) or status or actual["server"]["errors"])
    return {"passed": flat and clean, "model": str(options.run or options.fake or "tiny"), **actual}


async def loaded(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of the clients."""
    started = time.perf_counter()
    await load.run(options.requests, options.clients)
    seconds = time.perf_counter() - started
    tokens = (await load.metrics())[TOKENS]
    quarter = len(load.memory) // 4
    first, last = (float(np.mean(part)) for part in (load.memory[:quarter], load.memory[-quarter:]))
    return {
        "requests": dict(load.done),
        "wrong": load.wrong[:20],
        "full_queue": load.retries,
        "at_the_end": await load.settle(),
        "memory_mib": {"first_quarter": round(first, 1), "last_quarter": round(last, 1)},
        "seconds": round(seconds, 1),
        "requests_per_second": round(options.requests / seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "whole_ms": percentiles(load.seconds),
        "first_piece_ms": percentiles(load.first),
    }


def server(options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the server's command; without a run, trains a tiny model."""
    limits = ["--port=0", f"--max-body={MAX_BODY}", f"--body-timeout={BODY_TIMEOUT}", f"--queue={QUEUE}"]
    if options.fake:
        return [sys.executable, "-m", "tests.serving.fake_engine", f"--family={options.fake}", *limits]
    run = options.run
    if run is None:
        run = folder / "run"
        training = commands.start(commands.command("packed language model", run), folder / "cache")
        _, errors = training.communicate()
        if training.returncode:
            raise SystemExit(errors)
    return [sys.executable, "scripts/serve.py", "--run", str(run.absolute()), *limits]


def resident(pid: int) -> float:
    """Returns the memory of a process, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Returns percentiles in milliseconds."""
    return {f"p{part}": round(1000 * float(np.percentile(seconds, part)), 1) for part in (50, 90, 99)}


if __name__ == "__main__":
    main()
