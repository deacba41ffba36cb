"""Tokens that two vocabularies share."""

import io

import pytest
import sentencepiece
import tokenizers as hf

from tests.data.trained import trained_tokenizer
from tformer_jax.data.tokenizers.base import FIRST, MASK
from tformer_jax.data.tokenizers.correspondence import correspondence
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer, WordTokenizer
from tformer_jax.runs.shared_rows import SharedRows

SPECIAL = tuple(range(FIRST))
TEXTS = {"some": ["the cat sat on the mat", "cats sat"] * 9, "more": ["the dog sat on the mat", "dogs ran"] * 9}


def test_characters_by_hand():
    here, there = CharacterTokenizer("bcdx"), CharacterTokenizer("abc")
    pairs = correspondence(here, there)
    assert pairs.here == (*SPECIAL, FIRST, FIRST + 1)
    assert pairs.there == (*SPECIAL, FIRST + 1, FIRST + 2)
    assert pairs.tokens_there == FIRST + 3


def test_added_special_tokens_correspond_by_name():
    """The id of the mask token depends on the number of tokens before it."""
    here, there = (CharacterTokenizer(letters).extended([MASK]) for letters in ("abc", "b"))
    pairs = correspondence(here, there)
    assert dict(zip(pairs.here, pairs.there, strict=True))[FIRST + 3] == FIRST + 1
    assert len(pairs.here) == pairs.tokens_there == FIRST + 2


NOTATIONS = {
    "own": ["<2de>", "<2fr>", "<2zh>", "<2pt_BR>"],
    "NLLB": ["fra_Latn", "deu_Latn", "zho_Hans", "zho_Hant"],
    "M2M-100": ["__pt__", "__de__", "__en__"],
    "Marian": [">>en<<", ">>deu<<", ">>zho_Hant<<"],
}
SHARED = {
    ("own", "NLLB"): {"<2de>": "deu_Latn", "<2fr>": "fra_Latn"},
    ("NLLB", "own"): {"deu_Latn": "<2de>", "fra_Latn": "<2fr>"},
    ("M2M-100", "own"): {"__de__": "<2de>"},
    ("Marian", "NLLB"): {">>deu<<": "deu_Latn", ">>zho_Hant<<": "zho_Hant"},
    ("Marian", "M2M-100"): {">>deu<<": "__de__", ">>en<<": "__en__"},
}
"""Tags of one language: Chinese without a script may be either of two, and that of Brazil no other Portuguese."""


@pytest.mark.parametrize("kinds", SHARED)
def test_tags_of_languages_correspond_in_other_notations(kinds):
    here, there = (CharacterTokenizer("ab").extended(NOTATIONS[kind]) for kind in kinds)
    pairs = correspondence(here, there)
    names = {here.special.name(i): there.special.name(j) for i, j in zip(*pairs[:2], strict=True) if i >= FIRST + 2}
    assert names == SHARED[kinds] and pairs.tags == len(names)
    assert pairs.here[: FIRST + 2] == pairs.there[: FIRST + 2] == tuple(range(FIRST + 2))
    shared = SharedRows(0, here.vocab_size, pairs)
    assert str(shared).startswith(
        f"{FIRST + 2 + len(names)} of {there.vocab_size} rows kept ({len(names)} of them tags "
    )


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_subwords_correspond_as_the_vocabulary_writes_them(kind):
    some, more = (trained_tokenizer(kind, texts, 300) for texts in TEXTS.values())
    pieces = [{i: piece for piece, i in tokenizer.backend_tokenizer.get_vocab().items()} for tokenizer in (more, some)]
    pairs = correspondence(more, some)
    shared = set(pieces[0].values()) & set(pieces[1].values())
    assert len(shared) == len(pairs.here) == len(set(pairs.here)) > FIRST
    assert all(pieces[0][here] == pieces[1][there] for here, there in zip(*pairs[:2], strict=True))
    assert pairs.tokens_there == some.vocab_size


@pytest.mark.parametrize(
    "others", [(CharacterTokenizer("ab"), WordTokenizer(["a", "b"])), (ByteTokenizer(), CharacterTokenizer("ab"))]
)
def test_other_notations_are_not_comparable(others):
    assert correspondence(*others) is None


def test_bytes_correspond():
    assert correspondence(ByteTokenizer(), ByteTokenizer()).here == tuple(range(FIRST + 256))


def test_pieces_of_sentencepiece_are_those_of_other_tokenizers_with_its_mark():
    model = io.BytesIO()
    options = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 9, "model_writer": model}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS["some"]), **options)
    there = SentencePieceTokenizer(model.getvalue())
    shared = list(there.vocabulary()[1])[-1]
    library = hf.Tokenizer(hf.models.Unigram([("<unk>", 0.0), ("▁zzz", -2.0), (shared, -1.0)], 0))
    library.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    here = HFTokenizer(library)
    pairs = dict(zip(*correspondence(here, there)[:2], strict=True))
    assert pairs[here.vocabulary()[1][shared]] == there.vocabulary()[1][shared]
    assert here.vocabulary()[1]["▁zzz"] not in pairs
