"""A tokenizer.json is read as the class that transformers takes for each architecture, whatever its own parts are."""

import json

import pytest
import sentencepiece
import tokenizers as hf
import transformers

from tests.parity import checkpoints, multilingual
from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers

KINDS = (
    *("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "stablelm"),
    *("gemma2", "gemma3_text", "bart", "roberta", "modernbert"),
)
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "GemmaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"),
    "RobertaTokenizer",
)
TEXTS = ("the cat sat", " the  cat\n on", "a</s> <s>cat", "Ω cat <think>x")
SPECIAL = ["<pad>", "</s>", "<s>", "<unk>", "<|endoftext|>"]


def as_gemma() -> hf.Tokenizer:
    tokenizer = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = hf.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.Fuse()])
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = hf.trainers.BpeTrainer(vocab_size=60, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(checkpoints.TEXTS, trainer)
    tokenizer.post_processor = hf.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


@pytest.fixture(scope="module")
def written():
    bpe, trainer = hf.models.BPE, hf.trainers.BpeTrainer
    made = {
        "bytes": checkpoints.trained(bpe(), trainer, SPECIAL, metaspace=False),
        "words": checkpoints.trained(bpe(unk_token="<unk>"), trainer, SPECIAL, metaspace=True),
        "gemma": as_gemma(),
    }
    return {name: tokenizer.to_str() for name, tokenizer in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_for_each_class(written, kind, tmp_path):
    pair = kind == "bart"
    ids = {"eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "is_encoder_decoder": pair, **ids}))
    for name, text in written.items():
        (tmp_path / "tokenizer.json").write_text(text)
        for declared in CLASSES:
            options = {} if declared is None else {"tokenizer_class": declared}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            ours = load_checkpoint_tokenizers(tmp_path).target
            assert ours.vocab_size == len(theirs), (name, declared)
            for sentence in TEXTS:
                found = [*ours.special.before, *ours.encode(sentence), *ours.special.after]
                assert found == theirs(sentence)["input_ids"], (name, declared, sentence)


def test_nllb_with_its_sentencepiece_model_alone(tmp_path):
    """Pieces are those of SentencePiece itself, whose ids fairseq moves by one; ids and texts those of transformers."""
    names = [f"{word} {word[::-1]}" for word in {*" ".join(TEXTS[:2]).split(), "ünter", "Straße", "catalog", "attic"}]
    model = multilingual.pieces(model_type="bpe", vocab_size=90)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m2m_100", "decoder_start_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NllbTokenizer"}))
    with pytest.raises(UserError, match="has no tokenizer.json, and no additional_special_tokens, the tags of lang"):
        load_checkpoint_tokenizers(tmp_path)
    options = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": multilingual.NLLB}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    ours, theirs = load_checkpoint_tokenizers(tmp_path).target, transformers.AutoTokenizer.from_pretrained(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.vocab_size == len(theirs) == processor.get_piece_size() + 1 + len(multilingual.NLLB) + 1
    for text in (*checkpoints.TEXTS[:4], "the  cathedral on catalogs", "und das Haus", *names):
        expected = [i + 1 if i else 3 for i in processor.encode(text)]
        assert ours.encode(text) == expected == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    first = processor.get_piece_size() + 1  # as published; transformers 5 puts <mask> first if no ids are declared
    assert [ours.id_of(name) for name in (*multilingual.NLLB, "<mask>")] == [*range(first, first + 6)]
