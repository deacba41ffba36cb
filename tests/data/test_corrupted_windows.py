"""Batches of corrupted windows: what they depend on, and that evaluation covers a text."""

import collections

import numpy as np
import pytest

from tests.data.objectives import FIRST, KINDS, MASK, built
from tests.data.test_pipeline import assert_same, setup, take
from tformer_jax.base.errors import UserError
from tformer_jax.data import order
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.objectives.windows import CorruptedWindows, covering_corrupted
from tformer_jax.data.pipeline import evaluation_batches, train_batches
from tformer_jax.data.rows import Shards
from tformer_jax.special_tokens import IGNORED, PAD


class TestBatches:
    STREAMS = (np.arange(100, 170, dtype=np.uint16), np.arange(200, 230, dtype=np.uint16))

    def windows(self, seed: int = 3) -> CorruptedWindows:
        streams = [stream % 29 + FIRST for stream in self.STREAMS]
        return CorruptedWindows(streams, built("masked_tokens", 16, density=0.3), seed)

    def test_corruption_depends_on_seed_window_and_epoch_alone(self):
        windows = self.windows()
        assert windows.sizes == [55, 15]
        draws = [3, 70 + 3, 3, 60, 70 + 60]
        batch = windows.batch(draws)
        for row, draw in enumerate(draws):
            alone = windows.batch([draw])
            for key in batch:
                np.testing.assert_array_equal(batch[key][row], alone[key][0])
        assert (batch["tokens"][0] != batch["tokens"][1]).any()
        assert (batch["tokens"][3] != batch["tokens"][4]).any()
        assert (self.windows(seed=4).batch([3])["tokens"] != batch["tokens"][:1]).any()
        original = np.where(batch["targets"] == IGNORED, batch["tokens"], batch["targets"])
        np.testing.assert_array_equal(original[1], np.arange(103, 119) % 29 + FIRST)
        np.testing.assert_array_equal(original[4], np.arange(205, 221) % 29 + FIRST)

    @pytest.mark.parametrize("kind", ["masked tokens", "a mixture of masked tokens"])
    def test_draws_number_epochs_and_windows(self, kind):
        cfg, *_ = setup(kind)
        sizes = [30, 20]
        blocks = order.numbered_blocks(sizes, cfg.data.weights, cfg.seed, 50)
        draws = np.concatenate([blocks[number] for number in range(4)])
        indexed = order.index_blocks(sizes, cfg.data.weights, cfg.seed, 50)
        indices = np.concatenate([indexed[number] for number in range(4)])
        np.testing.assert_array_equal(draws % 50, indices)
        assert len(set(draws.tolist())) == len(draws)
        for window in range(50):
            epochs = (draws[draws % 50 == window] // 50).tolist()
            assert epochs == list(range(len(epochs)))

    @pytest.mark.parametrize("objective", KINDS)
    @pytest.mark.parametrize("length", [16, 33, 70])
    def test_evaluation_covers_each_token_once(self, objective, length):
        stream = np.random.default_rng(0).integers(FIRST, MASK, length)
        made = built(objective, 8, density=0.3)
        batches = list(covering_corrupted(stream, made, 4))
        assert_same(batches, covering_corrupted(stream, made, 4))
        assert {rows.shape for batch in batches for rows in batch.values()} <= {(4, n) for n in made.lengths.values()}
        actual = []
        for batch in batches:
            if objective == "masked_tokens":
                rows = np.where(batch["targets"] == IGNORED, batch["tokens"], batch["targets"])
            else:
                rows = np.concatenate([batch["source"], batch["target_out"]], axis=1)
            actual += rows[(rows >= FIRST) & (rows < MASK)].tolist()
        if objective == "denoising":
            actual = [token for batch in batches for token in batch["target_out"].ravel().tolist() if token >= FIRST]
        single = len(range(0, length, made.tokens)) != len(range(0, length - 1, made.tokens))
        assert collections.Counter(actual) == collections.Counter(stream[: length - single].tolist())
        halves = [list(covering_corrupted(stream, made, 4, Shards(2, (part,)))) for part in (0, 1)]
        for whole, *parts in zip(batches, *halves, strict=True):
            for key in whole:
                np.testing.assert_array_equal(whole[key], np.concatenate([part[key] for part in parts]))

    def test_a_text_shorter_than_a_window(self):
        cfg, _, tokenizers = setup("spans")
        with pytest.raises(
            UserError, match="data.window: the training text has 3 tokens, fewer than one window needs .6."
        ):
            train_batches(cfg, Corpus([{"text": "abc"}], [], []), tokenizers)

    def test_padding_only_where_rows_are_missing(self):
        cfg, corpus, tokenizers = setup("denoising")
        for batch in take(train_batches(cfg, corpus, tokenizers), 20):
            assert (batch["target_in"] != PAD).all()
        last = list(evaluation_batches(cfg, corpus.train[:3], tokenizers))[-1]
        assert (last["target_in"][-1] == PAD).all()
        assert (last["target_out"][-1] == IGNORED).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["masked tokens", "spans", "denoising"])
    def test_any_number_of_loader_processes(self, kind):
        expected = take(train_batches(*setup(kind)), 12)
        for workers in (1, 3):
            batches = train_batches(*setup(kind, workers=workers))
            assert_same(expected, take(batches, 12))
            batches.close()
