"""Tokenizers from files."""

import base64
import io
import json
import pickle

import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.data.tokenizers import Tokenizers, from_json
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.files import load_tokenizer
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.tiktoken import TiktokenTokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.special_tokens import EOS, SPECIAL_TOKENS, UNK, SpecialTokens

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog", "naïve 数字 123"] * 20
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257, b" c": 258, b"at": 259}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder with a tokenizer.json, a SentencePiece model and tiktoken ranks."""
    folder = tmp_path_factory.mktemp("tokenizers")
    other = hf.Tokenizer(hf.models.BPE())
    other.pre_tokenizer, other.decoder = hf.pre_tokenizers.ByteLevel(add_prefix_space=False), hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["[CLS]"],
        show_progress=False,
    )
    other.train_from_iterator(TEXTS, trainer)
    other.enable_truncation(2)
    other.save(str(folder / "tokenizer.json"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=9,
    )
    (folder / "spiece.model").write_bytes(model.getvalue())
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items())
    (folder / "gpt2.tiktoken").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "spiece.model", "gpt2.tiktoken"])
def test_round_trip_and_saved_form(files, name, tmp_path):
    trained = train_tokenizers(DataConfig(tokenizer="file", tokenizer_file=name), [{"text": "x"}], files)
    trained.save(tmp_path)
    loaded = Tokenizers.load(tmp_path).target
    again = pickle.loads(pickle.dumps(trained.source))
    for text in TEXTS:
        ids = trained.source.encode(text)
        assert len(SPECIAL_TOKENS) <= min(ids) <= max(ids) < trained.source.vocab_size
        assert trained.source.decode([*ids, EOS, 5]) == text
        assert loaded.encode(text) == again.encode(text) == ids == trained.source.encode_batch(["x", text])[1]


def test_a_folder_has_the_tokenizers_of_both_sides(files):
    """A kind for one side would be ignored silently."""
    cfg = DataConfig(tokenizer="file", target_tokenizer="bytes", shared_vocab=False, tokenizer_file=str(files))
    with pytest.raises(UserError, match="tokenizer_file=.*: is a folder with the tokenizers of both sides"):
        train_tokenizers(cfg, [{"source": "x", "target": "y"}])


def test_ids_are_those_of_the_library_moved_up(files):
    text = TEXTS[0]
    own = len(SPECIAL_TOKENS)
    expected = hf.Tokenizer.from_file(str(files / "tokenizer.json"))
    expected.no_truncation()
    assert load_tokenizer(files / "tokenizer.json").encode(text) == [own + i for i in expected.encode(text).ids]
    model = sentencepiece.SentencePieceProcessor(model_file=str(files / "spiece.model"))
    assert load_tokenizer(files / "spiece.model").encode(text) == [own + i for i in model.encode(text)]
    assert load_tokenizer(files / "spiece.model").encode("Ω")[-1] == UNK
    assert load_tokenizer(files / "gpt2.tiktoken").encode("the cat") == [own + i for i in (257, 258, 259)]


def test_a_tokenizer_json_of_our_own_keeps_its_ids(tmp_path):
    own = train_tokenizers(DataConfig(tokenizer="bpe", vocab_size=300), [{"text": text} for text in TEXTS]).target
    (tmp_path / "own.json").write_text(json.dumps(own.to_json()["model"]))
    assert load_tokenizer(tmp_path / "own.json").encode(TEXTS[0]) == own.encode(TEXTS[0])


def test_fallback_bytes_are_known_by_their_names():
    vocab = {"<unk>": 0, "a": 1, "<0x41>": 2, "<0xFF>": 3, "<0xff>": 4}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    assert HFTokenizer(tokenizer, SpecialTokens()).fallback_bytes == {2, 3}


def test_ranks_that_a_file_leaves_out_add_no_text():
    """Regression test: decoding one of them was a KeyError, which ended the server's engine."""
    tokenizer = TiktokenTokenizer({**{bytes([i]): i for i in range(256)}, b"ab": 258})
    ids = tokenizer.encode("ab!")
    gap = ids[0] - 1
    assert tokenizer.vocab_size == ids[0] + 1
    assert tokenizer.decode([gap, *ids, gap]) == "ab!"


@given(st.text(max_size=30))
def test_ranks_cover_every_text(text):
    text = text.replace("\ufffd", "")
    tokenizer = from_json({"kind": "tiktoken", "ranks": {base64.b64encode(t).decode(): r for t, r in RANKS.items()}})
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", None, "a.json does not exist"),
        ("a.bin", b"", "a.bin must end in .json or .model or .tiktoken"),
        ("a.json", b"{}", "a.json is not a valid .json tokenizer"),
        ("a.model", b"nothing", "a.model is not a valid .model tokenizer"),
        ("a.tiktoken", b"dGhl 1\n??? 2\n", "a.tiktoken, line 2: must be base64<space>rank"),
    ],
)
def test_mistakes(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        load_tokenizer(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_ids_of_a_vocabulary_in_lines_are_line_numbers(tmp_path, end):
    """bert-base-chinese has U+2028, the line separator, as a token."""
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028", "\x85", "\x0b", "a", "film"]
    (tmp_path / "vocab.txt").write_bytes("".join(line + end for line in lines).encode())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    tokenizer = load_checkpoint_tokenizers(tmp_path).target
    assert tokenizer.vocab_size == len(lines)
    assert tokenizer.encode("a film") == [lines.index("a"), lines.index("film")]
