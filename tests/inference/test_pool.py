"""The page pool of an engine for known prompts: large enough for all rows at once, and not much larger."""

import dataclasses

import pytest

from tests.helpers import rest_slow
from tests.inference.engines import (
    BEAM,
    GREEDY,
    LETTERS,
    LONG,
    SAMPLE,
    TOKENIZERS,
    endless,
    engine,
    finish,
    plain,
    submit,
)
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ModelConfig
from tformer_jax.inference import outputs
from tformer_jax.inference.engine import Engine, Request, pool, pool_pages
from tformer_jax.inference.requests import EncodedRequest

DECODER = ModelConfig(family="decoder_lm", max_length=131_072)
PROMPTS = [LETTERS.encode(text) for text in ("abc", "gfedcba" * 3, "a", "", "bb")]


@pytest.mark.parametrize(
    ("prompts", "outputs", "decode", "max_rows", "pages"),
    [
        ([2], 1, {}, 1, 16),  # 130 tokens: 9 pages
        ([2], 1, {"max_new_tokens": None}, 1, 16),  # as many at first, not 8,192
        ([2, 2], 1, {"max_new_tokens": 512}, 2, 128),  # 2 times 33 pages
        ([2, 128], 1, {}, 2, 32),  # 9 + 16 pages
        ([2, 2, 250, 250], 1, {}, 2, 64),  # the longest two run at a time: 2 times 24 pages
        ([16], 3, {"strategy": "sample", "max_new_tokens": 16}, 4, 8),  # 3 times 2 pages
        ([16], 3, {"strategy": "beam", "beams": 3, "max_new_tokens": 16}, 1, 4),  # 16 + 3 * 16 tokens
        ([131_000], 1, {}, 1, 8192),  # 72 tokens are left: 8,192 pages
        ([131_000] * 3, 1, {}, 3, 3 * 8193),  # not 32,768
        ([], 1, {}, 4, 1),
    ],
)
def test_pages_by_hand(prompts, outputs, decode, max_rows, pages):
    data = DataConfig(source="stdlib_text", batching="windows")
    cfg = Config(model=DECODER, data=data, decode=DecodeConfig(**{"max_new_tokens": 128, **decode}))
    assert pool_pages(cfg, prompts, max_rows=max_rows, outputs=outputs) == pages


@pytest.mark.parametrize(
    ("decode", "count", "outputs_of_row", "max_rows"),
    [(SAMPLE, 1, 3, 4), (BEAM, 1, 3, 1), (BEAM, 3, 3, 4), (SAMPLE, 1, 200, 200), (BEAM, 200, 2, 64)],
)
def test_rows_by_hand(decode, count, outputs_of_row, max_rows, monkeypatch):
    """A beam search needs one slot, whatever its number of outputs; `eval.batch_size` is 64."""
    monkeypatch.setattr(outputs, "engine_count", lambda *_: 1)  # 63 rows on three cores
    cfg, *parts = plain("decoder_lm")
    cfg = dataclasses.replace(cfg, decode=decode, eval=EvalConfig(batch_size=64))
    decoder = outputs.RowDecoder(cfg, *parts, TOKENIZERS)
    (only,) = decoder._engines([len(PROMPTS[0])], count, outputs_of_row)
    assert only.max_rows == max_rows


@pytest.mark.slow
@pytest.mark.parametrize("case", rest_slow({"greedy": (GREEDY, 1), "samples": (SAMPLE, 3), "beam": (BEAM, 2)}, 1))
def test_no_row_waits_for_pages_and_outputs_are_those_of_a_full_pool(case, monkeypatch):
    decode, count = case
    cfg, *parts = plain("decoder_lm")
    decoder = outputs.RowDecoder(dataclasses.replace(cfg, decode=decode), *parts, TOKENIZERS)
    made = []

    class Watched(Engine):
        def __init__(self, *args, pages, **options):
            super().__init__(*args, pages=pages if len(made) == 0 else None, **options)
            made.append(self)
            self.waiting = []

        def step(self):
            actual = super().step()
            self.waiting.append(self.pending)
            return actual

    monkeypatch.setattr(outputs, "Engine", Watched)
    monkeypatch.setattr(outputs, "engine_count", lambda *_: 1)
    prompts = list(map(EncodedRequest, PROMPTS))
    assert decoder(prompts, seed=1, outputs=count) == decoder(prompts, seed=1, outputs=count)
    limited, full = made
    assert limited.waiting[0] == 0
    assert limited.pages < full.pages


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow({"greedy": (GREEDY, 1), "samples": (SAMPLE, 3), "beam": (BEAM, 2)}, 1))
def test_a_pool_grows_with_outputs_that_have_no_limit(case, monkeypatch):
    """Pages for four new tokens of each row are allocated at first; the outputs are those of a full pool."""
    decode, count = case
    decode = dataclasses.replace(decode, max_new_tokens=None)
    (cfg, *parts), _ = endless()
    cfg = dataclasses.replace(cfg, decode=decode)
    monkeypatch.setattr(pool, "EXPECTED_TOKENS", 4)
    actual, pages = {}, {}
    for grows in (True, False):
        first = pool_pages(cfg, [len(ids) for ids in PROMPTS], max_rows=8, outputs=count) if grows else None
        served = Engine(cfg, *parts, TOKENIZERS, max_rows=8, pages=first, grows=grows)
        for index, ids in enumerate(filter(None, PROMPTS)):
            served.submit(Request(tuple(ids), decode, index=index, num_outputs=count, scored=True))
        events = served.step()
        pages[grows] = served.pages
        actual[grows] = finish(served, events)
    assert actual[True] == actual[False]
    assert pages[True] < pages[False]
    assert {event.tokens + len(ids) for ids in filter(None, PROMPTS) for _, event in actual[True].values()} >= {LONG}


@pytest.mark.long
@pytest.mark.parametrize("sizes", rest_slow([(2, None, 40), (3, 1, 7), (2, 4, 32), (2, 1, 8)], 2))
def test_an_output_without_a_limit_ends_where_its_share_of_a_fixed_pool_does(sizes, monkeypatch):
    """With its prompt, it has the 40 tokens of the model, or a share of the pages, or at least four new tokens."""
    rows, pages, tokens = sizes
    monkeypatch.setattr(pool, "EXPECTED_TOKENS", 4)
    trained, _ = endless()
    served = engine(trained, max_rows=rows, pages=pages)
    number = submit(served, "abc", dataclasses.replace(GREEDY, max_new_tokens=None))
    _, last = finish(served)[number, 0]
    assert (3 + last.tokens, last.finish) == (tokens, "length")
