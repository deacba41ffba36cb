"""BPE-dropout: which segmentations it draws."""

import itertools
import json
import pickle
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tformer_jax.config import DataConfig
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.features import Tokenized
from tformer_jax.data.tokenizers import Tokenizers, token_texts
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.data.transforms import base
from tformer_jax.data.transforms.bpe_dropout import RandomMerges

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog", "naïve 数字 123"] * 20
BPE = train_tokenizers(DataConfig(tokenizer="bpe", vocab_size=320), [{"text": text} for text in TEXTS]).target


def test_without_dropout_it_is_the_tokenizer():
    merges = RandomMerges(BPE, 0.0)
    assert [merges.encode(text, random.Random(0)) for text in TEXTS] == BPE.encode_batch(TEXTS)


def test_with_every_merge_left_out_a_token_is_a_byte():
    ids = RandomMerges(BPE, 1.0).encode("naïve cat", random.Random(0))
    assert len(ids) == len("naïve cat".encode())
    assert BPE.decode(ids) == "naïve cat"


def probabilities(pieces: tuple[str, ...], ranks: dict[tuple[str, ...], int], rate: float) -> Counter:
    """Returns the probability of each segmentation: the first merge by rank that is not left out, and so on."""
    pairs = enumerate(itertools.pairwise(pieces))
    places = [place for _, place in sorted((ranks[pair], place) for place, pair in pairs if pair in ranks)]
    actual = Counter({pieces: rate ** len(places)})
    for left_out, place in enumerate(places):
        merged = (*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :])
        for result, probability in probabilities(merged, ranks, rate).items():
            actual[result] += rate**left_out * (1 - rate) * probability
    return actual


def test_segmentations_have_the_probabilities_of_the_algorithm():
    merges = json.loads(BPE.backend_tokenizer.to_str())["model"]["merges"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(merges)}
    expected = probabilities(tuple("mat"), ranks, 0.4)
    assert len(expected) > 2
    random_merges, rng = RandomMerges(BPE, 0.4), random.Random(0)
    counts = Counter(tuple(token_texts(BPE, random_merges.encode("mat", rng))) for _ in range(4000))
    assert counts.keys() == expected.keys()
    for pieces, probability in expected.items():
        assert abs(counts[pieces] / 4000 - probability) < 0.03


@given(st.text(max_size=30), st.integers(0, 9))
def test_every_segmentation_has_a_round_trip(text, seed):
    text = text.replace("\ufffd", "")
    assert BPE.decode(RandomMerges(BPE, 0.3).encode(text, random.Random(seed))) == text


def test_loader_processes_draw_the_same():
    pairs, tokenizers = [{"source": text, "target": text} for text in TEXTS], Tokenizers(BPE, BPE)
    data = DataConfig(transforms=({"kind": "bpe_dropout", "rate": 0.5},))
    transforms = base.build(data.transforms, base.Training(data, Corpus(pairs, [], []), tokenizers), 0)
    reader = Tokenized(pairs, tokenizers, transforms=transforms)
    first, next_epoch = (reader.read(range(start, start + 8)) for start in (0, len(pairs)))
    assert first["source"].ids.tolist() != next_epoch["source"].ids.tolist()
    again = pickle.loads(pickle.dumps(reader)).read(range(8))
    assert again["target"].ids.tolist() == first["target"].ids.tolist()
