"""The server's start: its address, its flags, and their errors."""

import importlib.util
import socket
from unittest import mock

import jax
import numpy as np
import pytest

from tests.helpers import build, tiny
from tests.serving.fake_engine import BYTES, FakeEngine, served
from tformer_jax.base.errors import UserError
from tformer_jax.cli import serve
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference.engine import PAGE_SIZE
from tformer_jax.inference.engine.group import EngineGroup
from tformer_jax.runs import hardware
from tformer_jax.serving import server


def test_a_port_in_use_is_refused():
    with server.listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        assert server.address(bound) == f"http://127.0.0.1:{port}"
        bound.listen()
        with pytest.raises(UserError, match=f"--port {port}: Address already in use; write another one"):
            server.listen("127.0.0.1", port)


def test_two_servers_that_start_on_one_port():
    """Both can bind it before one of them accepts connections."""
    with server.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with server.listen("127.0.0.1", port) as second:
            server.accept(first)
            with pytest.raises(UserError, match=f"--port {port}: Address already in use; write another one"):
                server.accept(second)


@pytest.mark.parametrize("host", ["a b", "a" * 300, "192.0.2.1"])
def test_an_invalid_address(host):
    with pytest.raises(UserError, match=f"--host {host} --port 0: .*; write another one"):
        server.listen(host, 0)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_a_public_address_gives_a_warning(host, warned, monkeypatch, caplog, capsys):
    monkeypatch.setattr(server.Server, "run", lambda *_, **__: None)
    options = serve.parser().parse_args(["--run", "x", "--host", host, "--port", "0"])
    with server.listen(options.host, options.port) as bound:
        serve.serve_model(FakeEngine(), served(FakeEngine(), "seq2seq"), bound, options)
        port = bound.getsockname()[1]
    assert ("anyone who can reach this machine can use the model, and nothing is encrypted" in caplog.text) == warned
    shown = capsys.readouterr().out
    assert shown.startswith("Serving fake (seq2seq) at http://")
    assert f":{port};" in shown


def test_clients_can_connect_once_the_address_is_printed(monkeypatch):
    """The address is shown before the server's event loop runs, which accepts connections later."""
    connected = []

    def run(_, sockets):
        with socket.create_connection(sockets[0].getsockname(), timeout=5):
            connected.append(True)

    monkeypatch.setattr(server.Server, "run", run)
    options = serve.parser().parse_args(["--run", "x", "--port", "0"])
    with server.listen(options.host, options.port) as bound:
        serve.serve_model(FakeEngine(), served(FakeEngine(), "seq2seq"), bound, options)
    assert connected == [True]


@pytest.mark.parametrize("flags", [["--max-rows", "4"], ["--cache-tokens", "64"], ["--no-warm-up"]])
def test_flags_that_an_encoder_does_not_use(flags):
    with pytest.raises(UserError, match=f"^{flags[0]} is for models that generate text, but this run is an encoder"):
        serve.check_flags(serve.parser().parse_args(["--run", "x", *flags]), encoder=True)
    serve.check_flags(serve.parser().parse_args(["--run", "x"]), encoder=True)


@pytest.mark.parametrize("flags", [["--pooling", "first"], ["--normalize"]])
def test_flags_that_only_an_encoder_uses(flags):
    with pytest.raises(UserError, match=f"^{flags[0]} is for encoders, but this run is a model that generates text"):
        serve.check_flags(serve.parser().parse_args(["--run", "x", *flags]), encoder=False)
    serve.check_flags(serve.parser().parse_args(["--run", "x", *flags]), encoder=True)


@pytest.mark.parametrize(("memory", "tokens"), [(None, None), (2**20, None), (2**19, 64), (2**18, 32), (1, 16)])
def test_a_cache_takes_at_most_half_of_the_memory(memory, tokens, monkeypatch, capsys):
    """Of 2 layers, keys and values of 2 heads of 128 features in float32 take 4 KiB a token."""
    monkeypatch.setattr(hardware, "device_memory", lambda: memory)
    heads = {"num_heads": 2, "dim": 256, "decoder_layers": 2, "max_length": 64}
    data = DataConfig(source="stdlib_text", batching="windows", window=64)
    cfg = Config(model=tiny("decoder_lm", **heads), data=data, decode=DecodeConfig(max_new_tokens=15))
    options = serve.parser().parse_args(["--run", "x", "--max-rows", "2"])
    pages = serve.cache_pages(cfg, [cfg.model], options)
    assert pages == (tokens and tokens // PAGE_SIZE)
    assert (f"Each KV cache has {tokens} tokens, because one for 2 rows of 64 tokens" in capsys.readouterr().out) == (
        tokens is not None
    )


@pytest.mark.parametrize(
    ("pages", "rows", "most", "limit"), [(None, 2, None, None), (4, 2, None, 32), (8, 2, None, None), (4, 2, 15, None)]
)
def test_the_share_of_a_cache_that_ends_outputs(pages, rows, most, limit):
    """Of four pages of 16 tokens, each of two rows has 32; the model reads up to 64."""
    data = DataConfig(source="stdlib_text", batching="windows", window=64)
    cfg = Config(model=tiny("decoder_lm", max_length=64), data=data, decode=DecodeConfig(max_new_tokens=most))
    assert serve.shared_output_limit(cfg, pages, rows) == limit


def test_a_cache_that_is_too_small_for_one_output_is_refused():
    """One token of a prompt and 30 new ones of each of two beams take four pages of 16 tokens."""
    run = mock.Mock(config=Config(decode=DecodeConfig(strategy="beam", beams=2, max_new_tokens=30)))
    with pytest.raises(UserError, match="--cache-tokens 48: must be at least 64 for one output"):
        serve.make_engine(run, serve.parser().parse_args(["--run", "x", "--max-rows", "8", "--cache-tokens", "48"]))


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ([], [16, 16]),
        (["--max-rows", "48"], [16, 16, 16]),
        (["--max-rows", "8"], [8]),
        (["--max-rows", "32", "--cache-tokens", "4096"], [32]),  # which all rows share
    ],
)
def test_engines_on_a_cpu_divide_the_rows(flags, rows):
    cfg = Config(model=tiny("seq2seq", max_length=64))
    model, params = build(cfg.model)
    run = mock.Mock(config=cfg, model=model, params=params, tokenizers=Tokenizers(BYTES, BYTES))
    served = serve.make_engine(run, serve.parser().parse_args(["--run", "x", "--no-warm-up", *flags]))
    engines = served._engines if isinstance(served, EngineGroup) else [served]
    assert [engine.max_rows for engine in engines] == rows
    assert served.max_rows == sum(rows)


def test_other_models_have_eight_rows_by_default(monkeypatch):
    run = mock.Mock(config=Config(), params={"kernel": np.zeros((8, 8))})
    assert serve.default_rows(run) == serve.ROWS_OF_ENGINES == 32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert serve.default_rows(run) == serve.ROWS == 8


def test_samples_of_a_text_need_as_many_rows():
    run = mock.Mock(config=Config(decode=DecodeConfig(strategy="sample", candidates=9)))
    with pytest.raises(UserError, match="--max-rows 8: must be at least decode.candidates=9"):
        serve.make_engine(run, serve.parser().parse_args(["--run", "x", "--max-rows", "8"]))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_times_are_positive(value, capsys):
    with pytest.raises(SystemExit):
        serve.parser().parse_args(["--run", "x", "--timeout", value])
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "two words", "ключ", "line\n"])
def test_a_key_that_no_header_can_hold(key, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        serve.parser().parse_args(["--run", "x", "--api-key", key])
    assert "must consist of printable ASCII characters without spaces" in capsys.readouterr().err
    monkeypatch.setenv(serve.KEY_VARIABLE, key)
    with pytest.raises(SystemExit):
        serve.parser().parse_args(["--run", "x"])


def test_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv(serve.KEY_VARIABLE, "secret")
    assert serve.parser().parse_args(["--run", "x"]).api_key == "secret"
    assert serve.parser().parse_args(["--run", "x", "--api-key", "other"]).api_key == "other"


def test_missing_libraries(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install -e "\.\[serve\]"'):
        serve.main(["--run", "x"])
