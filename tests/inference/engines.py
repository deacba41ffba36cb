"""Engines of tiny models, and the outputs that they must give, for the tests of this folder."""

import functools

import jax.numpy as jnp
import numpy as np

from tests.helpers import build, tiny
from tests.inference import jitted_continuation
from tformer_jax.config import Config, DataConfig, DecodeConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.batching import pad_rows
from tformer_jax.inference.constraints import Constraints
from tformer_jax.inference.engine import Engine, Event, Request
from tformer_jax.lab.benchmarks import jitted_loop
from tformer_jax.models import registry
from tformer_jax.special_tokens import EOS

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc", "gfedcba", "a", "abcabcabc", "bb", "cab"]
LONG = 40
SEEDS = {"seq2seq": 7, "decoder_lm": 3}  # parameters whose outputs differ between texts
GREEDY = DecodeConfig(max_new_tokens=7)
SAMPLE = DecodeConfig(max_new_tokens=7, strategy="sample", temperature=2.0)
BEAM = DecodeConfig(max_new_tokens=7, strategy="beam", beams=3)


def config(family: str, **changes) -> Config:
    source, batching = {"seq2seq": ("cldr_translation", "buckets"), "decoder_lm": ("stdlib_text", "windows")}[family]
    model = tiny(family, max_length=LONG, **changes)
    return Config(model=model, data=DataConfig(source=source, batching=batching, window=8, bucket_lengths=(8, 16)))


def models(family: str, *, seed: int | None = None, **changes):
    """Returns a config, a model and its parameters; the bias of the logits is zero."""
    _, params = build(config(family, **changes).model, seed=seed or SEEDS[family])
    cfg = config(family, output_bias=True, **changes)
    return cfg, registry.build(cfg.model), params | {"head": {"bias": jnp.zeros(cfg.model.vocab_size)}}


@functools.cache
def plain(family: str):
    return models(family)


def engine(trained, max_rows: int = 3, **options) -> Engine:
    return Engine(*trained, TOKENIZERS, max_rows=max_rows, **options)


def encode(text: str, family: str) -> tuple[int, ...]:
    """Returns the token ids of a text as models of this family read them."""
    special = LETTERS.special
    return tuple((special.wrap_side if family == "seq2seq" else special.wrap_text)(LETTERS.encode(text)))


def submit(served: Engine, text: str, decode: DecodeConfig, **options) -> int:
    """Submits a request for a text, with these options of `Request`; returns its number."""
    return served.submit(Request(encode(text, served._cfg.model.family), decode, **options))


def finish(served: Engine, events: list[Event] | None = None) -> dict[tuple[int, int], tuple[str, Event]]:
    """Runs the engine to the end; returns the text of each request and sample, and its last event."""
    events = [] if events is None else events
    while not served.idle:
        events += served.step()
    texts: dict[tuple[int, int], str] = {}
    last: dict[tuple[int, int], Event] = {}
    for event in events:
        key = event.request, event.sample
        assert key not in last or last[key].finish is None, "nothing follows the end"
        texts[key], last[key] = texts.get(key, "") + event.text, event
    assert served.pages_used == 0
    assert all(event.finish for event in last.values())
    return {key: (texts[key], last[key]) for key in texts}


def alone(trained, text: str, decode: DecodeConfig, seed: int = 0, index: int = 0) -> str:
    """Returns the best output for this text, computed by the jitted loop."""
    cfg, model, params = trained
    translates = cfg.model.family == "seq2seq"
    run = jitted_loop.translate if translates else jitted_continuation.continue_text
    row = pad_rows([encode(text, cfg.model.family)], 1, 32, pad_left=not translates)
    keys, options = jitted_loop.row_keys(seed, np.array([index])), {"length": decode.max_new_tokens, "cfg": decode}
    outputs = run(model, params, row, keys, constraints=Constraints.from_config(decode, LETTERS), **options)
    (output,) = np.asarray(outputs)
    return LETTERS.decode(output, unknown="<unk>")


@functools.cache
def endless(family: str = "decoder_lm"):
    """Returns a model that never chooses EOS, and its greedy output for "abc"."""
    cfg = config(family, output_bias=True)
    model, params = build(cfg.model, seed=SEEDS[family])
    params["head"]["bias"] = params["head"]["bias"].at[np.array([EOS, 3])].set(-1e4)
    return (cfg, model, params), alone((cfg, model, params), "abc", GREEDY)
