"""Tokenizers: round trips, special tokens, and training on the training split only."""

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.data.corpora import Corpus
from tformer_jax.data.features import tokenize
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.tokenizers.training import cut_long_words, train_tokenizers
from tformer_jax.special_tokens import BOS, EOS, PAD_TOKEN, SPECIAL_TOKENS, UNK

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "der Hund saß auf dem Baum", "naïve 数字 123 456"]
CORPUS = Corpus(
    train=[{"source": text, "target": text.upper()} for text in TEXTS],
    validation=[{"source": "Ω", "target": "Ω"}],
    test=[],
)
KINDS = ("bytes", "characters", "words", "bpe", "unigram", "wordpiece")


def trained(kind: str, **changes) -> Tokenizers:
    return train_tokenizers(DataConfig(tokenizer=kind, vocab_size=300, **changes), CORPUS.train)


@pytest.fixture(scope="module", params=KINDS)
def tokenizers(request) -> Tokenizers:
    return trained(request.param)


def test_training_text_has_a_round_trip(tokenizers):
    for text in TEXTS:
        ids = tokenizers.source.encode(text)
        assert min(ids) >= len(SPECIAL_TOKENS)
        assert max(ids) < tokenizers.source.vocab_size
        assert tokenizers.source.decode(ids) == text


def test_decoding_stops_at_eos_and_drops_special_tokens(tokenizers):
    ids = tokenizers.target.encode("the cat")
    assert tokenizers.target.decode([BOS, *ids, PAD_TOKEN, UNK, EOS, *ids]) == "the cat"
    assert tokenizers.target.decode([]) == ""


def test_saved_and_loaded(tokenizers, tmp_path):
    tokenizers.save(tmp_path)
    loaded = Tokenizers.load(tmp_path)
    for text in [*TEXTS, "unseen: Ω <s>"]:
        assert loaded.source.encode(text) == tokenizers.source.encode(text)
        assert loaded.target.decode(loaded.target.encode(text)) == tokenizers.target.decode(
            tokenizers.target.encode(text)
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
def test_any_text_has_a_round_trip(kind):
    tokenizer = trained(kind, clean_whitespace=False).source

    @given(st.text(max_size=40))
    def check(text):
        text = text.replace("\ufffd", "")
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram", "wordpiece"])
def test_names_of_special_tokens_are_ordinary_text(kind):
    """Also in loader processes, which get a pickled tokenizer."""
    tokenizer = trained(kind).source
    text = "a <pad> b </s> c"
    ids = tokenizer.encode(text)
    assert not {BOS, EOS, PAD_TOKEN} & {*ids}
    assert kind == "wordpiece" or tokenizer.decode(ids) == text
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == ids


def test_characters_outside_the_training_split_are_unknown():
    assert trained("characters").source.encode("caΩ")[-1] == UNK


def test_ids_outside_the_bytes_are_left_out():
    assert ByteTokenizer().decode([*ByteTokenizer().encode("ab"), 300]) == "ab"


def test_words_are_ranked_by_frequency():
    tokenizer = train_tokenizers(DataConfig(tokenizer="words", vocab_size=8), [{"text": "b b a c c c d e"}]).target
    assert tokenizer.encode("c b a d e") == [4, 5, 6, 7, UNK]
    assert tokenizer.decode([4, UNK, 5]) == "c b"


def test_streams_train_the_same_vocabulary_as_sequences():
    class Stream:
        def __iter__(self):
            return iter(CORPUS.train)

    for kind in ("characters", "words", "wordpiece"):
        cfg = DataConfig(tokenizer=kind, tokenizer_examples=2, vocab_size=300)
        chosen = train_tokenizers(cfg, CORPUS.train).target
        assert train_tokenizers(cfg, Stream()).target.to_json() == chosen.to_json()
    assert UNK not in train_tokenizers(cfg, CORPUS.train).target.encode("LOG")


def test_a_period_of_the_data_does_not_hide_a_language():
    """Regression test: of every second line, one of two alternating languages was never read."""
    train = [{"text": ("the cat" if number % 2 else "die Katze") + f" {number}"} for number in range(1000)]
    words = train_tokenizers(DataConfig(tokenizer="words", tokenizer_examples=100, vocab_size=50), train).target
    assert UNK not in words.encode("the cat") + words.encode("die Katze")


def test_alphabets_read_every_example():
    train = [{"text": "abc abc"}] * 999 + [{"text": "xyz Ω"}]
    for kind in ("characters", "wordpiece"):
        cfg = DataConfig(tokenizer=kind, tokenizer_examples=1, vocab_size=50)
        assert UNK not in train_tokenizers(cfg, train).target.encode("xyz Ω"), kind


def test_every_digit_alone():
    tokenizer = train_tokenizers(
        DataConfig(tokenizer="bpe", vocab_size=400, split_digits=True),
        [{"text": "12 1234 1212 1234"}] * 50,
    ).target
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.decode(tokenizer.encode("x 1234")) == "x 1234"


def test_separate_vocabularies():
    tokenizers = trained("characters", shared_vocab=False)
    assert tokenizers.source.encode("t") != [UNK]
    assert tokenizers.target.encode("t") == [UNK]
    block = tokenize([{"source": "t", "target": "T"}], tokenizers)
    assert UNK not in (*block["source"].ids, *block["target"].ids)
    shared = trained("characters")
    assert shared.source is shared.target


def test_a_vocabulary_without_room_for_bytes():
    with pytest.raises(UserError, match="data.vocab_size=100: a byte-level vocabulary needs at least 260"):
        train_tokenizers(DataConfig(tokenizer="bpe", vocab_size=100), CORPUS.train)


def test_a_vocabulary_without_room_for_characters():
    texts = [{"text": "ab ac ba"}]
    with pytest.raises(UserError, match="data.vocab_size=9: a WordPiece vocabulary of these texts needs at least 10"):
        train_tokenizers(DataConfig(tokenizer="wordpiece", vocab_size=9), texts)
    assert train_tokenizers(DataConfig(tokenizer="wordpiece", vocab_size=10), texts).target.vocab_size == 10


def test_long_words_are_cut_before_training():
    """The time to train BPE grows with the square of the length of a word."""
    long, text = "ab" * 1250, "a\nbc  d"
    assert cut_long_words(text) == [text]
    pieces = cut_long_words(f"{text} {long}\n{text}")
    assert "".join(pieces) == f"{text} {long}\n{text}"
    assert max(len(word) for piece in pieces for word in piece.split()) == 1000
    assert len(pieces) == 3
    assert cut_long_words("x" * 1000) == ["x" * 1000]
    assert cut_long_words("") == [""]


TRAIN = """
import json
from tests.data.test_tokenizers import trained
print(json.dumps(trained("{kind}").to_json(), sort_keys=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_slow(["bpe", "wordpiece"], 1))
def test_every_process_trains_the_same_vocabulary(kind):
    """Regression test: WordPiece numbered its characters in the order of a hash table, another one in each process."""
    here = json.dumps(trained(kind).to_json(), sort_keys=True)
    command = [sys.executable, "-c", TRAIN.format(kind=kind)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{here}\n"


@pytest.mark.parametrize(("content", "sentence"), [(None, "has lost its tokenizer"), ("{}", "is damaged")])
def test_lost_files(tmp_path, content, sentence):
    if content:
        (tmp_path / "source.json").write_text(content)
    with pytest.raises(UserError, match=f"source.json .*{sentence}"):
        Tokenizers.load(tmp_path)
