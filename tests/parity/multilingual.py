"""Makes checkpoint folders of multilingual models, with tokenizers of each published format trained on sentences."""

import io
import json
from pathlib import Path

import sentencepiece
import tokenizers as hf
import torch
import transformers
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES as MBART
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as MBART50

from tests.parity import checkpoints

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
NLLB = ["deu_Latn", "eng_Latn", "srp_Cyrl", "zho_Hans", "zho_Hant"]
NEUTRAL = {"num_beams": 1, "early_stopping": False, "forced_eos_token_id": None, "max_length": 20}
SMALL = checkpoints.MARIAN | {"num_hidden_layers": 2}


def pieces(**options) -> bytes:
    """Trains a SentencePiece model."""
    model, sizes = io.BytesIO(), {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 9}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(checkpoints.TEXTS), model_writer=model, **sizes | options
    )
    return model.getvalue()


def scored(model: bytes, first: int = 3) -> list[tuple[str, float]]:
    """Returns the pieces and scores of a SentencePiece model, without its special ones."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(first, processor.get_piece_size())]


def m2m(folder: Path) -> dict:
    """A SentencePiece model, and `vocab.json` with other ids; tags are not in it."""
    (folder / "spm").write_bytes(pieces(model_type="bpe"))
    names = [*SPECIAL, *(piece for piece, _ in reversed(scored((folder / "spm").read_bytes())))]
    (folder / "vocab").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    transformers.M2M100Tokenizer(str(folder / "vocab"), str(folder / "spm")).save_pretrained(folder)
    return SMALL | {"vocab_size": len(names) + 108}


def nllb(folder: Path) -> dict:
    """`tokenizer.json` with BPE."""
    library = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    trainer = hf.trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)
    library.train_from_iterator(checkpoints.TEXTS, trainer)
    model = json.loads(library.to_str())["model"]
    options = {"merges": list(map(tuple, model["merges"])), "additional_special_tokens": NLLB}
    made = transformers.NllbTokenizer(vocab=model["vocab"], **options)
    made.save_pretrained(folder)
    return SMALL | {"vocab_size": len(made)}


def mbart(folder: Path) -> dict:
    """`tokenizer.json` with Unigram and the tags of 25 languages, after the end of a source."""
    vocab = [(name, 0.0) for name in SPECIAL] + scored(pieces()) + [(name, 0.0) for name in [*MBART, "<mask>"]]
    made = transformers.MBartTokenizer(vocab=vocab)
    made.save_pretrained(folder)
    return SMALL | {"vocab_size": len(made), "decoder_start_token_id": made.convert_tokens_to_ids("ro_RO")}


def mbart50(folder: Path) -> dict:
    """A SentencePiece model alone, as mbart-large-50 has it; the tags of 52 languages follow its pieces."""
    (folder / "sentencepiece.bpe.model").write_bytes(pieces())
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": MBART50}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MBart50Tokenizer"}))
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model")).get_piece_size()
    return SMALL | {"vocab_size": size + 1 + len(MBART50) + 1}


def t5(folder: Path) -> dict:
    """A SentencePiece model without sentinels, as mT5 has it."""
    (folder / "spiece.model").write_bytes(pieces(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}))
    return checkpoints.PAIR | {"num_decoder_layers": 2, "vocab_size": 64}


def converted(folder: Path) -> int:
    """Replaces a SentencePiece model by the `tokenizer.json` of transformers; returns the size of its vocabulary."""
    made = transformers.T5Tokenizer.from_pretrained(folder)
    made.save_pretrained(folder)
    (folder / "spiece.model").unlink()
    return len(made)


def umt5(folder: Path) -> dict:
    return t5(folder) | {"vocab_size": converted(folder) + 3}


def madlad(folder: Path) -> dict:
    """`tokenizer.json` with tags as added tokens, and other ids of the special tokens than T5's."""
    (folder / "spiece.model").write_bytes(pieces(user_defined_symbols=["<2de>", "<2en>"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0}))
    return checkpoints.PAIR | {"num_decoder_layers": 2, "vocab_size": converted(folder)}


MAKERS = {
    "facebook/nllb-200-distilled-600M": nllb,
    "facebook/mbart-large-en-ro": mbart,
    "facebook/m2m100_418M": m2m,
    "facebook/mbart-large-50-many-to-many-mmt": mbart50,
    "google/madlad400-3b-mt": madlad,
    "google/mt5-small": t5,
    "google/umt5-small": umt5,
}
UNTIED = "mt5", "madlad"
"""Names of models with an output head of their own, umT5 included."""


def make(folder: Path, name: str) -> torch.nn.Module:
    """Saves a model with a published config but small sizes, literally as published, and returns it."""
    folder.mkdir(exist_ok=True)
    config = PUBLISHED[name]
    config = {key: value for key, value in config.items() if key not in NEUTRAL} | MAKERS[name](folder) | NEUTRAL
    if config["model_type"] != "mbart" or "50" in name:
        config |= {"decoder_start_token_id": PUBLISHED[name]["decoder_start_token_id"]}
    given = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "torch_dtype")}
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class(**{key: value for key, value in given.items() if key not in NEUTRAL})).eval()
    if any(part in name for part in UNTIED):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        mean = float(parameter.ndim == 1 and key.endswith("weight"))
        torch.nn.init.normal_(parameter, mean=mean, std=0.1 if parameter.ndim == 1 else 0.4)
        if "encoder_attn.out_proj.weight" in key:
            parameter.data *= 4  # outputs depend on the source
        if key.endswith("Attention.q.weight"):
            parameter.data *= config["d_kv"] ** -0.5  # as T5's initializer, since its scores are not scaled
    if hasattr(model, "model"):
        torch.nn.init.normal_(model.model.shared.weight)
        model.model.decoder.layer_norm.weight.data *= -1  # or the most probable token is the one that is read
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return kind.from_pretrained(folder, dtype=torch.float32).eval()
