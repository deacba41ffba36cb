"""The page pool of an engine for known prompts: large enough for all rows at once, and not much larger."""

import dataclasses

import pytest

from tests.helpers import rest_slow
from tests.inference.engines import BEAM, GREEDY, LETTERS, SAMPLE, TOKENIZERS, plain
from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig, ModelConfig
from tformer_jax.inference import outputs
from tformer_jax.inference.engine import Engine, pool_pages

DECODER = ModelConfig(family="decoder_lm", max_length=131_072)
PROMPTS = [LETTERS.encode(text) for text in ("abc", "gfedcba" * 3, "a", "", "bb")]


@pytest.mark.parametrize(
    ("prompts", "outputs", "decode", "max_rows", "pages"),
    [
        ([2], 1, {}, 1, 16),  # 130 tokens: 9 pages
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
def test_rows_by_hand(decode, count, outputs_of_row, max_rows):
    """A beam search needs one slot, whatever its number of outputs; `eval.batch_size` is 64."""
    cfg, *parts = plain("decoder_lm")
    cfg = dataclasses.replace(cfg, decode=decode, eval=EvalConfig(batch_size=64))
    decoder = outputs.RowDecoder(cfg, *parts, TOKENIZERS)
    assert decoder._engine([PROMPTS[0]], count, outputs_of_row, 0.0)._max_rows == max_rows


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
            found = super().step()
            self.waiting.append(self.pending)
            return found

    monkeypatch.setattr(outputs, "Engine", Watched)
    assert decoder(PROMPTS, seed=1, outputs=count) == decoder(PROMPTS, seed=1, outputs=count)
    limited, full = made
    assert limited.waiting[0] == 0
    assert limited.pages < full.pages
