"""Options of tokenizer_config.json beside a tokenizer.json: texts are tokenized as transformers does."""

import json
from pathlib import Path

import pytest
import tokenizers as hf
import transformers

from tests.parity import checkpoints
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers

TEXTS = (
    "the cat sat",
    "The CAT on a Mät",
    "中文 cat",
    " cat",
    "  the cat",
    "the  cat\n sat",
    "a cat</s> sat",
    "a <mask> on",
    "",
)
WORDS = ("the", "The", "cat", "CAT", "sat", "on", "a", "mat", "mät", "Mat", "Mät", "中", "文", "中文")
NAMES = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def bert(folder: Path) -> None:
    """Writes BERT's tokenizer as tokenizer.json."""
    vocab = {word: number for number, word in enumerate((*NAMES.values(), *WORDS))}
    tokenizer = hf.Tokenizer(hf.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens([*NAMES.values()])
    tokenizer.normalizer = hf.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = hf.decoders.WordPiece()
    ends = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = hf.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "pad_token_id": 0}))
    options = {"tokenizer_class": "BertTokenizer", **{f"{role}_token": name for role, name in NAMES.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def as_published(folder: Path) -> None:
    """Writes Llama 2's tokenizer.json, which prepends the space in a normalizer."""
    checkpoints.llama(folder)
    path = folder / "tokenizer.json"
    tokenizer = hf.Tokenizer.from_file(str(path))
    steps = [hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")]
    tokenizer.normalizer, tokenizer.pre_tokenizer = hf.normalizers.Sequence(steps), None
    tokenizer.save(str(path))


def as_mistral(folder: Path) -> None:
    """Writes the same tokenizer.json for Mistral, for which transformers has no class of its own."""
    as_published(folder)
    change(folder / "config.json", {"model_type": "mistral"})


def as_llama_3(folder: Path) -> None:
    """Writes a byte-level BPE for Llama."""
    checkpoints.gpt2(folder)
    change(folder / "config.json", {"model_type": "llama"})


def bart(folder: Path) -> None:
    """Writes the tokenizer of BART."""
    checkpoints.bart_tokenizer(folder)
    tokenizer = hf.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([hf.AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"eos_token_id": 2, "decoder_start_token_id": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "bart", "is_encoder_decoder": True, **ids}))


def change(path: Path, changes: dict) -> None:
    """Changes fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (bert, {}),
        (bert, {"do_lower_case": False}),
        (bert, {"strip_accents": False}),
        (bert, {"tokenize_chinese_chars": False}),
        (bert, {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}),
        (checkpoints.gpt2, {"tokenizer_class": "GPT2Tokenizer"}),
        (checkpoints.gpt2, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        (checkpoints.gpt2, {"add_bos_token": True}),
        (checkpoints.gpt2, {"add_eos_token": True}),
        (checkpoints.llama, {"add_bos_token": False}),
        *[
            (write, {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_prefix_space": spaced})
            for write in (checkpoints.llama, as_published)
            for legacy in (False, True)
            for spaced in (None, False)
        ],
        (checkpoints.llama, {"add_eos_token": True}),
        *[(as_mistral, {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}) for legacy in (False, True)],
        (as_llama_3, {"tokenizer_class": "LlamaTokenizerFast"}),
        *[(bart, {"tokenizer_class": kind, "add_prefix_space": True}) for kind in (None, "BartTokenizer")],
        (bart, {"mask_token": "<mask>"}),
        (bart, {"mask_token": {"content": "<mask>", "lstrip": True, "__type": "AddedToken"}}),
        *[(checkpoints.t5, {"tokenizer_class": kind, "extra_ids": 0}) for kind in (None, "T5TokenizerFast")],
    ],
)
def test_token_ids_of_texts(write, changes, tmp_path):
    write(tmp_path)
    change(tmp_path / "tokenizer_config.json", changes)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_checkpoint_tokenizers(tmp_path).target
    for text in TEXTS:
        assert [*ours.special.before, *ours.encode(text), *ours.special.after] == theirs(text)["input_ids"], text
