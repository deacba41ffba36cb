"""A tokenizer.json is read as the class that transformers takes for each architecture, whatever its own parts are."""

import json

import pytest
import tokenizers as hf
import transformers

from tests.parity import checkpoints
from tformer_jax.data.tokenizers import load_checkpoint_tokenizers

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
