"""Changed vocabularies: the `tokenizers` and SentencePiece libraries encode texts with the same pieces as before."""

import io
import json

import pytest
import sentencepiece
import tokenizers as hf

from tests.data.trained import trained_tokenizer
from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers import new_pieces
from tformer_jax.data.tokenizers.base import MASK
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer
from tformer_jax.data.tokenizers.surgery import extend, needed_tokens, pieces_of, trim
from tformer_jax.inference.detokenization import TextStream
from tformer_jax.special_tokens import EOS, UNK, SpecialTokens

TEXTS = [
    "the cat sat on the mat, the dogs ran to the logs",
    "der Hund und die Katze saßen auf der Matte",
    "unbelievable translations of transformers are transformed",
    "an übermäßig long word: Donaudampfschifffahrt",
] * 9
FEW = TEXTS[1:2]
WORD = "transformation"
KINDS = {
    "bytes": ("bpe", {}),
    "characters": ("bpe", {"character_coverage": 0.99, "byte_fallback": True}),
    "unigram": ("unigram", {}),
    "wordpiece": ("wordpiece", {}),
    "words": ("words", {}),
}


def trained(name):
    kind, settings = KINDS[name]
    return trained_tokenizer(kind, TEXTS, 450, **settings)


def spm(model_type: str, **options) -> SentencePieceTokenizer:
    model = io.BytesIO()
    options |= {"model_type": model_type, "vocab_size": 110, "hard_vocab_limit": False, "minloglevel": 9}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **options)
    return SentencePieceTokenizer(model.getvalue())


MAKERS = {name: (lambda name=name: trained(name)) for name in KINDS}
MAKERS |= {f"sentencepiece {kind}": (lambda kind=kind: spm(kind)) for kind in ("unigram", "bpe")}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return MAKERS[request.param]()


def trimmed(tokenizer, texts=FEW):
    return trim(tokenizer, needed_tokens(tokenizer, {i for row in tokenizer.encode_batch(texts) for i in row}))


def piece_strings(tokenizer, text):
    """The pieces of a text, as the library writes them."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens
    if isinstance(tokenizer, SentencePieceTokenizer):
        return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model).encode(text, out_type=str)
    return [tokenizer.pieces[i - 4] for i in tokenizer.encode(text)]


def test_texts_have_the_same_pieces_without_the_others(tokenizer):
    changed = trimmed(tokenizer)
    assert changed.tokenizer.vocab_size == len(changed.rows) < tokenizer.vocab_size
    names = {i: piece for piece, i in tokenizer.vocabulary()[1].items()}
    for text in FEW:
        assert piece_strings(changed.tokenizer, text) == piece_strings(tokenizer, text)
        assert [changed.rows[i][0] for i in changed.tokenizer.encode(text)] == tokenizer.encode(text)
        assert changed.tokenizer.decode(changed.tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    for piece, i in changed.tokenizer.vocabulary()[1].items():
        assert names.get(changed.rows[i][0], piece) == piece
    assert changed.tokenizer.special.names == tokenizer.special.names
    assert len(changed.tokenizer.fallback_bytes) == len(tokenizer.fallback_bytes)


def test_segmentation_is_that_of_the_library():
    """The pieces of every token and word, from which others are computed."""
    for name in ("bytes", "unigram", "wordpiece"):
        tokenizer = trained(name)
        pieces, model = pieces_of(tokenizer), tokenizer.backend_tokenizer.model
        words = {word for text in TEXTS for word in new_pieces._split_words(tokenizer, text)}
        start = [token for token in tokenizer.vocabulary()[1] if not token.startswith(("##", "<"))]
        for word in (*words, *start):
            actual, expected = pieces.segment(word), [token.value for token in model.tokenize(word)]
            if name == "unigram":  # of equal sums, another may be chosen
                actual, expected = (pytest.approx(sum(map(pieces.scores.get, each))) for each in (actual, expected))
            assert actual == expected


def test_scores_of_unigram_and_ranks_of_merges_stay():
    unigram, bpe = trained("unigram"), trained("bytes")
    old, new = (dict(each.describe()["model"]["model"]["vocab"]) for each in (unigram, trimmed(unigram).tokenizer))
    assert new == pytest.approx({piece: old[piece] for piece in new}, rel=1e-12)
    assert min(new, key=new.get) == min(old, key=old.get)  # on which the score of unknown characters depends
    old, new = (each.describe()["model"]["model"]["merges"] for each in (bpe, trimmed(bpe).tokenizer))
    assert new == [merge for merge in old if merge in new]
    assert 0 < len(new) < len(old)


def test_a_new_word_is_one_token_in_place_of_its_pieces(tokenizer):
    (piece,), refused = new_pieces.pieces_of_list(tokenizer, [WORD, "two words"])
    assert refused == ["two words"]
    changed = extend(tokenizer, [piece], languages=["de", "fr"])
    new = changed.tokenizer
    text = f"the {WORD} of the cat"
    (i,) = {*new.encode(text)} & {new.vocabulary()[1][piece]}
    old, now = tokenizer.encode(text), new.encode(text)
    place = now.index(i)
    after = len(old) - (len(now) - place - 1)
    assert changed.rows[i] == tuple(old[place:after])
    assert [changed.rows[i][0] for i in now[:place] + now[place + 1 :]] == old[:place] + old[after:]
    assert new.decode(now) == text
    assert list(languages_of(new)) == ["de", "fr"]


def test_symbols_tags_and_added_tokens_move_with_the_vocabulary():
    old = trained("bytes").with_symbols(["<<A>>", "x y"]).normalized(["lowercase"], "en").extended([MASK, "<2de>"])
    for changed in (trimmed(old), extend(old, ["Ġtransformation"], ["<<A>>", "<<B>>"], ["de", "fr"])):
        new = changed.tokenizer
        for text in ("der x y Katze <<A>>", "<<A>>"):
            assert [changed.rows[i][0] for i in new.encode(text)] == old.encode(text)
        for name in (MASK, "<2de>"):
            assert changed.rows[new.id_of(name)] == (old.id_of(name),)
        assert new.steps == old.steps
        assert new.special.suppressed[-1] == new.id_of(new.extension[-1])
    assert changed.rows[new.symbol_ids["<<B>>"]] == tuple(old.encode_normalized(["<<B>>"])[0])
    assert changed.rows[new.id_of("<2fr>")] == (old.id_of("<2de>"),)
    assert len(changed.rows) == new.vocab_size


@pytest.mark.parametrize("name", ["sentencepiece unigram", "sentencepiece bpe", "metaspace", "bytes"])
def test_symbols_are_words_of_vocabularies_that_write_spaces(name):
    """Regression test: the spaces around them were lost."""
    if name == "metaspace":
        library = hf.Tokenizer(hf.models.BPE())
        library.pre_tokenizer, library.decoder = hf.pre_tokenizers.Metaspace(), hf.decoders.Metaspace()
        library.train_from_iterator(TEXTS, hf.trainers.BpeTrainer(vocab_size=90, show_progress=False))
        tokenizer = HFTokenizer(library)
    else:
        tokenizer = MAKERS[name]()
    new = extend(tokenizer, [], ["<br>", "<b>"]).tokenizer
    for text in ("the cat <br> sat <b> on", "<br> the <br>", "<b> <br>", "the cat"):
        ids = new.encode(text)
        stream = TextStream(new)
        assert new.decode(ids) == "".join([*map(stream.feed, ids), stream.close()]) == text
    written = "the<br>cat" if name == "bytes" else "the <br> cat"
    assert new.decode(new.encode("the<br>cat")) == written


def test_ids_of_a_checkpoint_are_renumbered_everywhere():
    library = trained("bytes").to_library()
    library.add_special_tokens(["<end>"])
    end = library.token_to_id("<end>")
    library.post_processor = hf.processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", end)])
    special = SpecialTokens(((3, "<unk>"), (end, "<end>")), end, (end,), None, None, UNK, (), after=(end,))
    changed = trimmed(HFTokenizer(library, special))
    new, last = changed.tokenizer, changed.tokenizer.vocab_size - 1
    assert new.special.eos == new.special.after == (last,) != (end,)
    template = json.loads(new.backend_tokenizer.to_str())["post_processor"]["special_tokens"]["<end>"]
    assert template["ids"] == [last] == new.backend_tokenizer.encode("the").ids[-1:]


def test_pieces_that_are_also_other_tokens_keep_what_they_are_merged_from():
    """Regression test: texts with the context of decoding, or with a piece that is also an added token, changed."""
    library = trained("bytes").to_library()
    ids = [library.token_to_id(piece) for piece in ("Ġthe", "Ġcat")]
    assert None not in ids
    library.add_tokens([hf.AddedToken("Ġcat")])
    special = SpecialTokens(((EOS, "</s>"),), EOS, (EOS,), None, None, UNK, (), context=ids[0])
    old = HFTokenizer(library, special)
    assert {*ids} <= {*old.encode("a the cat")}
    changed = trim(old, needed_tokens(old, old.encode("a the cat")))
    assert [changed.rows[i][0] for i in changed.tokenizer.encode("a the cat")] == old.encode("a the cat")


def test_words_of_texts_are_those_that_save_the_most_tokens():
    tokenizer = CharacterTokenizer(sorted(set("".join(TEXTS))))
    assert new_pieces.pieces_of_texts(tokenizer, TEXTS, 9) == []
    tokenizer = trained_tokenizer("bpe", TEXTS, 262)
    texts = ["aaa bb aaa bb bb c,d"] * 3
    rows = tokenizer.encode_batch([" aaa", " bb"])
    saved = {"Ġaaa": 3 * (len(rows[0]) - 1), "Ġbb": 9 * (len(rows[1]) - 1)}
    assert new_pieces.pieces_of_texts(tokenizer, texts, 2) == sorted(saved, key=saved.get, reverse=True)


def test_tokens_of_another_tokenizer_are_written_in_the_own_notation():
    """Those of WordPiece within words have no space before them, the others have."""
    bpe, other = trained("bytes"), trained("wordpiece")
    words = new_pieces.pieces_of_tokenizer(bpe, other, None)
    assert words
    vocab = other.vocabulary()[1]
    extended = extend(bpe, words).tokenizer
    for word in words:
        text = extended.decode([extended.vocabulary()[1][word]])
        assert (text[1:] if text.startswith(" ") else f"##{text}") in vocab


def test_vocabularies_of_all_bytes_are_refused():
    with pytest.raises(UserError, match="kind 'bytes' cannot be changed"):
        pieces_of(ByteTokenizer())
