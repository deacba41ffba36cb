"""The joined pieces of streamed text equal the text of all tokens."""

import dataclasses
import io
import itertools

import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers import rest_slow
from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import FIRST, Tokenizer
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer
from tformer_jax.data.tokenizers.simple import ByteTokenizer, CharacterTokenizer
from tformer_jax.data.tokenizers.tiktoken import TiktokenTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference.detokenization import MAX_WAITING, TextBuffer, TextStream, cut, output_decoder
from tformer_jax.special_tokens import DEFAULT_SPECIAL_TOKENS, EOS

TEXTS = ["the cat sat on the mat.", "a dog's log , it is n't", "naïve 数字 123 456", "😀 \ufffd 数学 a\n\nb  c"] * 9
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"\xe6\x95": 257, b"\xb0\xe5": 258, b"at": 259}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TRAINED = ("bytes", "characters", "words", "bpe", "unigram", "wordpiece")


def trained(kind: str) -> Tokenizer:
    cfg = DataConfig(tokenizer=kind, vocab_size=320)
    return train_tokenizers(cfg, [{"text": text} for text in TEXTS]).target


def spiece_model(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, hard_vocab_limit=False, minloglevel=9, **options
    )
    return model.getvalue()


def spiece(**options) -> Tokenizer:
    return SentencePieceTokenizer(spiece_model(**options))


def llama() -> Tokenizer:
    """A tokenizer like Llama 2's: words after U+2581, and bytes for all other characters."""
    pieces = ["<unk>", "[CLS]", *BYTES, "▁", "▁▁", "a", "t", "▁a", "▁the", "数", "\ufffd", "."]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.normalizer = hf.normalizers.Sequence([hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")])
    steps = [
        hf.decoders.Replace("▁", " "),
        hf.decoders.ByteFallback(),
        hf.decoders.Fuse(),
        hf.decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = hf.decoders.Sequence(steps)
    return HFTokenizer(tokenizer)


def bert() -> Tokenizer:
    """A WordPiece tokenizer that removes spaces before punctuation."""
    pieces = ["[UNK]", "[CLS]", "a", "the", "##a", "##t", ".", "n't", "'s", ",", "do", "not", "数"]
    tokenizer = hf.Tokenizer(hf.models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[UNK]"])
    tokenizer.pre_tokenizer, tokenizer.decoder = hf.pre_tokenizers.Whitespace(), hf.decoders.WordPiece(cleanup=True)
    return HFTokenizer(tokenizer)


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁▁a", "a", "t", "▁the", "数", "."]
    tokenizer = hf.Tokenizer(hf.models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = hf.pre_tokenizers.Metaspace(), hf.decoders.Metaspace()
    return HFTokenizer(tokenizer)


def word_ends() -> Tokenizer:
    """A BPE tokenizer as of 2016, whose tokens mark the end of a word."""
    vocab = {piece: number for number, piece in enumerate(["a", "t", "a</w>", "t</w>", "数</w>", "<unk>"])}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = hf.pre_tokenizers.Whitespace(), hf.decoders.BPEDecoder()
    return HFTokenizer(tokenizer)


def marian() -> Tokenizer:
    """A tokenizer whose decoded texts have no space at their ends, where the piece of a space may stand alone."""
    pieces = ["</s>", "<unk>", "▁", "▁the", "a", "t", "数", ".", "<pad>"]
    special = dataclasses.replace(DEFAULT_SPECIAL_TOKENS, names=((0, "</s>"), (8, "<pad>")), eos=(0,), unknown=1, pad=8)
    return SentencePieceTokenizer(spiece_model(vocab_size=60), special, {piece: i for i, piece in enumerate(pieces)})


IMPORTED = {
    "marian": marian,
    "sentencepiece": lambda: spiece(vocab_size=60),
    "sentencepiece with bytes": lambda: spiece(vocab_size=320, byte_fallback=True, character_coverage=0.98),
    "sentencepiece with all spaces": lambda: spiece(
        vocab_size=60, remove_extra_whitespaces=False, add_dummy_prefix=False
    ),
    "tiktoken": lambda: TiktokenTokenizer(RANKS),
    "llama": llama,
    "bert": bert,
    "metaspace": metaspace,
    "word ends": word_ends,
}


@pytest.fixture(scope="module", params=[*TRAINED, *IMPORTED])
def tokenizer(request) -> Tokenizer:
    return IMPORTED[request.param]() if request.param in IMPORTED else trained(request.param)


def pieces(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> tuple[list[str], bool]:
    """Returns the text shown after each token and at the end, and whether the stream is done."""
    stream = TextStream(tokenizer, stop)
    shown = [stream.feed(token) for token in tokens]
    return [*shown, stream.close()], stream.done


def check(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> None:
    shown, done = pieces(tokenizer, tokens, stop)
    text, (end, *_) = tokenizer.decode(tokens), tokenizer.special.eos
    assert "".join(shown) == cut(text, stop)
    assert done == (end in tokens or any(each in text for each in stop))
    whole = TextBuffer(tokenizer)
    assert "".join([*map(whole.feed, tokens), whole.close()]) == text
    assert whole.done == (end in tokens)


@pytest.mark.parametrize("kind", [kind for kind in (*TRAINED, *IMPORTED) if kind != "marian"])
def test_a_continuation_has_the_space_between_it_and_its_prompt(kind):
    tokenizer = IMPORTED[kind]() if kind in IMPORTED else trained(kind)
    ids = tokenizer.encode("a t a" if kind == "word ends" else "the cat sat on the mat.")
    prompts = {n: tokenizer.decode(ids[:n]) for n in range(1, len(ids))}
    prompts = {n: prompt for n, prompt in prompts.items() if tokenizer.encode(prompt) == ids[:n]}
    for n, prompt in prompts.items():
        assert prompt + output_decoder(tokenizer, continues=True).decode(ids[n:]) == tokenizer.decode(ids)
    assert prompts


STOPS = st.lists(st.text(alphabet="the a.数\ufffd", min_size=1, max_size=4), max_size=3)


@pytest.mark.parametrize("examples", rest_slow([25, 500], 1))
def test_random_tokens(tokenizer, examples):
    few, (end, *_) = [*range(FIRST + 3), *tokenizer.fallback_bytes][: FIRST + 60], tokenizer.special.eos
    token = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from(few)

    @settings(max_examples=examples)
    @given(st.lists(token.filter(lambda i: i != end), max_size=40), STOPS)
    def run(tokens, stop):
        silent = itertools.groupby(tokens, lambda token: not tokenizer.decode([token]))
        assume(all(len(list(run)) <= MAX_WAITING for without_text, run in silent if without_text))
        check(tokenizer, tokens, stop)
        check(tokenizer, [*tokens[:9], end, *tokens[9:]], stop)

    run()


@pytest.mark.parametrize("examples", rest_slow([25, 100], 1))
def test_random_texts(tokenizer, examples):
    alphabet = st.sampled_from("the cat.\n数字é😀 \ufffd'") | st.characters(exclude_categories=["Cs"])

    @settings(max_examples=examples)
    @given(st.text(alphabet=alphabet, max_size=40), STOPS)
    def run(text, stop):
        check(tokenizer, tokenizer.encode(text), stop)

    run()


@pytest.mark.parametrize("examples", rest_slow([120, 1000], 1))
@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "sentencepiece with bytes", "llama"])
def test_broken_bytes(kind, examples):
    """Draws arbitrary bytes, valid UTF-8 or not, between tokens of text."""
    tokenizer = IMPORTED[kind]() if kind in IMPORTED else trained(kind)
    first = min(tokenizer.fallback_bytes, default=FIRST)
    byte = st.sampled_from(b"\xf0\x9f\x98\x80\xe2\x82\xac\xe0\xed\xc3\xa9\xff\x80A")
    token = byte.map(lambda value: first + value) | st.integers(0, tokenizer.vocab_size - 1)

    @settings(max_examples=examples)
    @given(st.lists(token, max_size=30), STOPS)
    def run(tokens, stop):
        check(tokenizer, tokens, stop)

    run()


def test_a_character_is_shown_when_it_is_complete():
    tokenizer = ByteTokenizer()
    shown, done = pieces(tokenizer, tokenizer.encode("aé€!"), [])
    assert shown == ["a", "", "é", "", "", "€", "!", ""]
    assert not done


def test_a_character_that_never_becomes_complete_is_shown_at_the_end():
    tokenizer = ByteTokenizer()
    assert pieces(tokenizer, tokenizer.encode("a€")[:-1], [])[0] == ["a", "", "", "\ufffd"]


def test_words_are_shown_with_the_space_before_them():
    tokenizer = trained("words")
    assert pieces(tokenizer, tokenizer.encode("the cat"), [])[0] == ["the", " cat", ""]


def test_a_run_of_fallback_bytes_waits_for_its_end():
    tokenizer = llama()
    first = min(tokenizer.fallback_bytes)
    letter = tokenizer.encode("a")[-1]
    run = [first + byte for byte in "é\n".encode()]
    assert pieces(tokenizer, [letter, *run, letter, letter], [])[0] == ["a", "", "", "", "é\na", "a", ""]
    assert pieces(tokenizer, [letter, *run, first + 0xFF], [])[0][-1] == "\ufffd" * 4


def test_a_token_without_text_does_not_end_a_run():
    tokenizer = llama()
    first = min(tokenizer.fallback_bytes)
    letter, smile = tokenizer.encode("a")[-1], [first + byte for byte in "😀".encode()]
    silent = first - 1
    assert tokenizer.decode([silent]) == ""
    tokens = [letter, *smile[:2], silent, *smile[2:], letter]
    assert pieces(tokenizer, tokens, [])[0] == ["a", "", "", "", "", "", "😀a", ""]


def test_a_possible_start_of_a_stop_text_is_held_back():
    tokenizer = CharacterTokenizer("abcd")
    shown, done = pieces(tokenizer, tokenizer.encode("abacabcd"), ["abc"])
    assert shown == ["", "", "ab", "ac", "", "", "", "", ""]
    assert done


def test_nothing_is_returned_after_the_end():
    tokenizer = CharacterTokenizer("abcd")
    stream = TextStream(tokenizer, ["b"])
    assert [stream.feed(token) for token in tokenizer.encode("abc")] == ["a", "", ""]
    assert stream.done
    assert stream.close() == ""
    stream = TextStream(tokenizer, ["bc"])
    assert [stream.feed(token) for token in [*tokenizer.encode("ab"), EOS, *tokenizer.encode("c")]] == [
        "a",
        "",
        "b",
        "",
    ]
    assert stream.done
    assert stream.close() == ""


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("abcd", [], "abcd"),
        ("abcd", ["x"], "abcd"),
        ("abcd", ["bc"], "a"),
        ("abcbc", ["bc"], "a"),
        ("abcd", ["d", "bcd"], "a"),  # complete at the same place: the longer one
        ("abcd", ["abcd", "bc"], "a"),  # "bc" is complete first
        ("abab", ["b", "abab"], "a"),
    ],
)
def test_the_stop_text_that_ends_first_counts(text, stop, left):
    assert cut(text, stop) == left
    tokenizer = CharacterTokenizer("abcd")
    assert "".join(pieces(tokenizer, tokenizer.encode(text), stop)[0]) == left


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TRAINED, *IMPORTED, "broken bytes"])
def test_the_cost_of_a_token_does_not_grow(kind):
    tokenizer = IMPORTED[kind]() if kind in IMPORTED else ByteTokenizer() if "broken" in kind else trained(kind)
    tokens = [FIRST + 0x80] * 300 if "broken" in kind else tokenizer.encode(" ".join(TEXTS))
    lengths = []

    class Counting:
        special, fallback_bytes = tokenizer.special, tokenizer.fallback_bytes

        def decode(self, ids):
            lengths.append(len(ids))
            return tokenizer.decode(ids)

    stream = TextStream(Counting(), ["never"])
    text = "".join([*map(stream.feed, tokens), stream.close()])
    assert text == tokenizer.decode(tokens)
    assert len(tokens) > 200
    assert max(lengths) < 25
    assert len(lengths) < 5 * len(tokens)
