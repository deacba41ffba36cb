"""Many simultaneous clients, disconnecting clients, a full queue, a failing engine, and shutdown."""

import concurrent.futures
import contextlib
import dataclasses
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers import rest_slow
from tests.serving.fake_engine import FakeEngine, served
from tests.serving.live import around, events, live, until
from tformer_jax.config import DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.inference.engine import Request
from tformer_jax.serving.errors import RequestError
from tformer_jax.serving.worker import EngineThread

ROOT = Path(__file__).resolve().parents[2]
COMPLETE, ATTENTION = "/v1/completions", "/attention"
LONG = {"prompt": "a" * 2000, "max_tokens": 2000}


def test_concurrent_requests_get_their_own_outputs():
    texts = [f"text {number} {'x' * (number % 7)}" for number in range(60)]
    with live(max_rows=3, queue=60) as server, concurrent.futures.ThreadPoolExecutor(20) as pool:

        def ask(text: str) -> str:
            if len(text) % 2:
                return "".join(chunk["choices"][0]["text"] for chunk in server.stream(COMPLETE, prompt=text))
            return server.post(COMPLETE, prompt=text).json()["choices"][0]["text"]

        assert list(pool.map(ask, texts)) == [text[::-1] for text in texts]


def test_a_stream_arrives_while_it_is_generated():
    with live() as server:
        server.engine.delay = 0.05
        with server.client.stream("POST", COMPLETE, json={"prompt": "abcdef", "stream": True}) as response:
            pieces = events(response)
            assert next(pieces)["choices"][0]["text"] == "f"
            server.engine.gate.clear()
            assert next(pieces)["choices"][0]["text"] == "e"
            server.engine.gate.set()
            assert "".join(piece["choices"][0]["text"] for piece in pieces) == "dcba"


def test_disconnecting_during_a_stream_frees_its_pages():
    with live(delay=0.01) as server:
        with server.client.stream("POST", COMPLETE, json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()  # deleting it would disconnect
            next(lines)
            until(lambda: server.metric("tformer_pages_used") == 1)
        until(lambda: server.engine.canceled == [1])
        until(lambda: server.metric("tformer_pages_used") == 0)
        until(lambda: server.metric(f'tformer_requests_total{{route="{COMPLETE}",status="499"}}') == 1)


def test_disconnecting_before_the_response_frees_its_pages():
    with live(delay=0.01, max_rows=1) as server:
        for number in (1, 2):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + COMPLETE, json=LONG, timeout=0.5)
            until(lambda number=number: server.engine.canceled == list(range(1, number + 1)))
        until(lambda: server.metric("tformer_pages_used") == 0)


def test_disconnecting_while_pending_never_starts_the_request():
    with live(max_rows=1) as server:
        server.engine.gate.clear()
        thread, actual = server.background(COMPLETE, prompt="abc")
        until(lambda: len(server.worker.jobs) == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + COMPLETE, json={"prompt": "xyz"}, timeout=0.5)
        until(lambda: len(server.worker.jobs) == 1)
        server.engine.gate.set()
        thread.join()
        assert actual[0].json()["choices"][0]["text"] == "cba"
        assert server.metric("tformer_tokens_generated_total") == 3


def at_once(server, count: int, prompt: str) -> list:
    """Returns the responses to `count` requests; the engine continues after all of them were accepted or refused."""
    server.engine.gate.clear()
    asked = [server.background(COMPLETE, prompt=prompt) for _ in range(count)]
    until(lambda: len(server.worker.jobs) + sum(map(len, (actual for _, actual in asked))) == count)
    server.engine.gate.set()
    for thread, _ in asked:
        thread.join()
    return [actual[0] for _, actual in asked]


def test_a_full_queue_refuses_and_later_accepts():
    with live(max_rows=2, queue=3, delay=0.002) as server:
        answers = at_once(server, 9, "a" * 50)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert 9 - 2 - 3 - 1 <= len(refused) <= 9 - 2 - 3  # one may be served before the last one arrives
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert all(answer.status_code == 200 for answer in answers if answer not in refused)
        assert server.post(COMPLETE, prompt="ab").status_code == 200


def test_a_full_queue_refuses_during_a_step_of_the_engine():
    """A step that compiles may take minutes."""
    with live(max_rows=2, queue=1) as server:
        server.engine.gate.clear()
        asked = [server.background(COMPLETE, prompt="abc", n=2) for _ in range(3)]
        until(lambda: len(server.worker.jobs) == 3)
        assert server.post(COMPLETE, prompt="ab").json()["error"]["code"] == "queue_full"
        assert server.client.get("/health").status_code == 200
        server.engine.gate.set()
        for thread, _ in asked:
            thread.join()
        assert server.post(COMPLETE, prompt="ab").status_code == 200


def test_requests_of_another_beam_width_have_rows_of_their_own():
    """Regression test: beam search was refused if requests of greedy decoding used as many rows as a lane has."""
    worker = EngineThread(FakeEngine(max_rows=2), limit=1)
    greedy, wide = (Request((1,), decode) for decode in (DecodeConfig(), DecodeConfig(strategy="beam", beams=2)))
    with contextlib.ExitStack() as jobs:
        for request in (greedy, greedy, wide, wide, greedy):
            jobs.enter_context(worker.job([request]))
        with pytest.raises(RequestError, match="the queue of 1 requests is full"):
            jobs.enter_context(worker.job([wide]))


def test_a_burst_fills_the_rows_before_it_fills_the_queue():
    with live(max_rows=8, queue=1) as server:
        assert [answer.status_code for answer in at_once(server, 8, "a" * 30)] == [200] * 8


def test_accepted_requests_get_their_log_probabilities_although_many_end_at_once(monkeypatch):
    with live(max_rows=6, queue=1) as server:
        score = server.model.score
        monkeypatch.setitem(server.model.__dict__, "score", lambda *given: (time.sleep(0.1), score(*given))[1])
        server.engine.gate.clear()
        asked = [server.background(COMPLETE, prompt="ab", logprobs=0) for _ in range(6)]
        until(lambda: len(server.worker.jobs) == 6)
        server.engine.gate.set()
        for thread, _ in asked:
            thread.join()
        assert [answer.status_code for _, (answer,) in asked] == [200] * 6
        assert all(answer.json()["choices"][0]["logprobs"]["tokens"] == ["b", "a"] for _, (answer,) in asked)


@contextlib.contextmanager
def slow_attention(**limits):
    """Runs a server whose pages of attention are the thread that computes them, once the second result is set."""
    engine, started, gate = FakeEngine(), threading.Event(), threading.Event()

    def render(*_: str) -> str:
        started.set()
        assert gate.wait(20)
        return threading.current_thread().name

    with around(engine, dataclasses.replace(served(engine, "decoder_lm"), attention=render), **limits) as server:
        try:
            yield server, started, gate
        finally:
            gate.set()


def test_attention_has_the_thread_and_the_queue_of_other_requests():
    with slow_attention(queue=1) as (server, started, gate):
        thread, actual = server.background(ATTENTION, text="a")
        assert started.wait(10)
        refused = server.post(ATTENTION, text="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        server.server.stop()
        until(lambda: server.worker.stopping)
        refused = server.post(ATTENTION, text="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        gate.set()
        thread.join()
        assert (actual[0].status_code, actual[0].text) == (200, "engine")


def test_attention_has_the_timeout_of_other_requests():
    with slow_attention(timeout=0.5) as (server, _, gate):
        assert server.post(ATTENTION, text="a").status_code == 504
        gate.set()
        assert server.post(ATTENTION, text="a").status_code == 200


class SlowTokenizer(ByteTokenizer):
    """Encodes and decodes the text `slow` once `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.gate = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self._wait(text)
        return super().encode(text)

    def decode(self, ids, **options) -> str:
        text = super().decode(ids, **options)
        self._wait(text)
        return text

    def _wait(self, text: str) -> None:
        if text == "slow":
            self.started.set()
            assert self.gate.wait(20)


SLOW_IDS = ByteTokenizer().encode("slow")
TOKENIZED = {
    "completion": ("decoder_lm", COMPLETE, {"prompt": "slow"}),
    "token ids of a completion": ("decoder_lm", COMPLETE, {"prompt": SLOW_IDS, "echo": True}),
    "tokenization": ("decoder_lm", "/tokenize", {"prompt": "slow"}),
    "detokenization": ("decoder_lm", "/detokenize", {"tokens": SLOW_IDS}),
    "translation": ("seq2seq", "/translate", {"text": "slow"}),
    "label": ("classifier", "/classify", {"input": "slow"}),
    "embedding": ("masked_lm", "/v1/embeddings", {"input": "slow"}),
}


@pytest.mark.parametrize("case", rest_slow(TOKENIZED, 4))
def test_other_requests_are_answered_while_a_text_is_tokenized(case):
    family, route, body = case
    engine, tokenizer = FakeEngine(), SlowTokenizer()
    model = dataclasses.replace(served(engine, family), tokenizers=Tokenizers(tokenizer, tokenizer))
    with around(engine, model) as server:
        thread, actual = server.background(route, **body)
        try:
            assert tokenizer.started.wait(20)
            assert server.post("/tokenize", prompt="abc").status_code == 200
            assert not actual
        finally:
            tokenizer.gate.set()
        thread.join()
        assert actual[0].status_code == 200


def test_an_engine_failure_is_reported_to_all_requests():
    with live(max_rows=1, delay=0.005) as server:
        first, answer = server.background(COMPLETE, **LONG)
        until(lambda: server.metric("tformer_requests_running") == 1)
        streamed: list = []
        stream = threading.Thread(target=lambda: streamed.extend(server.stream(COMPLETE, **LONG)))
        assert server.client.get("/health").status_code == 200
        server.engine.max_rows = 3
        stream.start()
        until(lambda: server.metric("tformer_requests_running") == 2)
        refusal = server.post(COMPLETE, prompt="explode")
        first.join()
        stream.join()
        for error in (refusal.json()["error"], answer[0].json()["error"], streamed[-1]["error"]):
            assert error["code"] == "engine_failed"
            assert error["message"] == "the engine has failed (RuntimeError: out of memory): restart the server"
        assert (refusal.status_code, answer[0].status_code) == (500, 500)
        health = server.client.get("/health")
        assert health.status_code == 503
        assert health.json()["reason"] == "RuntimeError: out of memory"
        assert server.post(COMPLETE, prompt="ab").status_code == 500


def test_shutdown_finishes_requests_and_accepts_no_new_ones():
    with live(delay=0.005) as server:
        thread, actual = server.background(COMPLETE, prompt="a" * 60)
        until(lambda: server.metric("tformer_requests_running") == 1)
        server.server.stop()
        until(lambda: server.worker.stopping)
        answer = server.post(COMPLETE, prompt="ab")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
        health = server.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "stopping")
        thread.join()
        assert actual[0].status_code == 200
        server.running.join(5)
        assert not server.running.is_alive()


@pytest.mark.parametrize("hurry", [False, True])
def test_requests_beyond_the_grace_period_are_canceled(hurry):
    with live(delay=0.01, grace=100.0 if hurry else 0.2) as server:
        thread, actual = server.background(COMPLETE, **LONG)
        until(lambda: server.metric("tformer_requests_running") == 1)
        server.server.stop()
        if hurry:
            server.server.stop()
        thread.join()
        assert actual[0].status_code == 503
        server.running.join(5)
        assert not server.running.is_alive()
        assert server.engine.canceled == [1]


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_missing_headers_end_the_connection(sent):
    with live(body_timeout=0.3) as server, server.raw() as client:
        client.sendall(sent)
        assert client.recv(100) == b""  # closed by the server


def test_a_body_that_was_answered_unread_ends_the_connection():
    with live(body_timeout=0.6) as server, server.raw() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(b"a")
        client.settimeout(5)
        assert client.recv(100) == b""


@pytest.mark.long
def test_headers_in_two_parts_and_a_second_request():
    head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with live(body_timeout=1) as server, server.raw() as client:
        for _ in range(2):
            client.sendall(head)
            time.sleep(0.55)
            client.sendall(b"\r\n")
            assert client.recv(10_000).startswith(b"HTTP/1.1 200")
        client.sendall(head)
        assert client.recv(100) == b""


def test_a_long_response_is_not_a_header_timeout():
    with live(body_timeout=0.4, delay=0.05) as server:
        assert server.post(COMPLETE, prompt="abcdefghij").json()["choices"][0]["text"] == "jihgfedcba"


def test_many_unfinished_headers_do_not_block_other_clients():
    """The server raises a low soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with live() as server, contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(server.raw()).sendall(b"GET /health HTTP/1.1\r\nHost: ")
            assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
@pytest.mark.parametrize("number", rest_slow([signal.SIGTERM, signal.SIGINT], 1))
def test_a_signal_ends_the_process_with_status_0(number):
    command = [sys.executable, "-m", "tests.serving.fake_engine", "--port", "0", "--delay", "0.005"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split(" at ")[1].split(";")[0]
        asked = {"prompt": "a" * 100, "stream": True}
        with httpx.stream("POST", url + COMPLETE, json=asked, timeout=30) as response:
            pieces = events(response)
            next(pieces)
            process.send_signal(number)
            assert len(list(pieces)) == 99
        output, errors = process.communicate(timeout=20)
        assert (process.returncode, output, errors) == (0, "", "")


@pytest.mark.slow
def test_a_long_step_does_not_outlive_the_grace_period():
    """A compilation may exceed the grace period: the process ends without waiting for it."""
    command = [sys.executable, "-m", "tests.serving.fake_engine", "--port", "0", "--delay", "300", "--grace", "0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split(" at ")[1].split(";")[0]
        with socket.create_connection((url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))) as client:
            body = b'{"prompt": "a"}'
            head = f"POST {COMPLETE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
