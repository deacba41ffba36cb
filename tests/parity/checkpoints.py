"""Makes checkpoint folders as published: small random models with tokenizers trained on a few sentences."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers as hf
import torch
import transformers

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog sat", "der Hund und die Katze"] * 20
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
PAIR = {"d_model": 8, "num_layers": 2, "num_heads": 4, "d_kv": 3, "d_ff": 12}
MARIAN = {
    "d_model": 8,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 12))},
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 32,
}


def save(folder: Path, kind: str, config: dict, **generation) -> torch.nn.Module:
    """Saves a model with random parameters, large enough to matter, and returns it."""
    model_class = getattr(transformers, kind)
    settings = model_class.config_class(**config)
    untied = kind == "T5ForConditionalGeneration" and not config.get("tie_word_embeddings", True)
    if untied:
        settings.tie_word_embeddings = False  # which the class of the config replaces
    model = model_class(settings).eval()
    if untied:
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name or parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.4)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, std=0.4)
    if kind in ("MarianMTModel", "BartForConditionalGeneration", "T5ForConditionalGeneration"):
        vary(model)
    if generation:
        model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(folder)
    return model


def vary(model: torch.nn.Module) -> None:
    """Changes an encoder-decoder, whose outputs would be the same for any source, so that they depend on it.

    The last norm of a post-norm model is negated: otherwise the most probable token is the one that the decoder reads.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
    if isinstance(model, transformers.T5ForConditionalGeneration):
        return
    torch.nn.init.normal_(model.model.shared.weight)
    model.model.shared.weight.data[model.config.pad_token_id] = 0  # as trained models have it
    model.model.decoder.layers[-1].final_layer_norm.weight.data *= -1


def save_tokenizer(folder: Path, tokenizer: hf.Tokenizer, **config) -> None:
    """Saves `tokenizer.json` with a fixed length, as all-MiniLM-L6-v2 has; transformers ignores it."""
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def trained(model, trainer: Callable, special: list[str], *, metaspace: bool) -> hf.Tokenizer:
    tokenizer = hf.Tokenizer(model)
    if metaspace:
        tokenizer.pre_tokenizer = hf.pre_tokenizers.Metaspace()
        tokenizer.decoder = hf.decoders.Metaspace()
        alphabet = []
    else:
        tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = hf.decoders.ByteLevel()
        alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300 if alphabet else 60, "special_tokens": special, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, trainer(initial_alphabet=alphabet, **options))
    return tokenizer


def gpt2(folder: Path) -> torch.nn.Module:
    """No padding; the same token begins and ends texts, and it is the last one."""
    special = "<|endoftext|>"
    tokenizer = trained(hf.models.BPE(), hf.trainers.BpeTrainer, [], metaspace=False)
    tokenizer.add_special_tokens([special])
    end = tokenizer.token_to_id(special)
    config = {"n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": end + 1}
    model = save(folder, "GPT2LMHeadModel", config | {"bos_token_id": end, "eos_token_id": end})
    save_tokenizer(folder, tokenizer, bos_token=special, eos_token=special, unk_token=special, add_bos_token=False)
    return model


def llama(folder: Path) -> torch.nn.Module:
    """Texts begin with <s>; a token without a space in front is decoded differently at the start of a text."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = trained(hf.models.BPE(unk_token="<unk>"), hf.trainers.BpeTrainer, special, metaspace=True)
    tokenizer.post_processor = hf.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": 64}
    model = save(folder, "LlamaForCausalLM", config | {"bos_token_id": 1, "eos_token_id": [2, 5]})
    save_tokenizer(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return model


def t5(folder: Path) -> torch.nn.Module:
    """Padding starts the decoder; texts end with </s>, id 1; the model has more rows than the tokenizer."""
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    trainer = lambda **options: hf.trainers.UnigramTrainer(unk_token="<unk>", **options)  # noqa: E731
    tokenizer = trained(hf.models.Unigram(), trainer, special, metaspace=True)
    pieces = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    pieces[len(special) :] = sorted(pieces[len(special) :])  # the trainer's order of equal scores is random
    tokenizer.model = hf.models.Unigram(pieces, unk_id=2)
    tokenizer.post_processor = hf.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = {**PAIR, "vocab_size": 70, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = save(folder, "T5ForConditionalGeneration", config)
    save_tokenizer(folder, tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    return model


def bart_tokenizer(folder: Path) -> dict:
    """Writes a tokenizer with BART's ids of special tokens; returns the config's fields."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = trained(hf.models.BPE(), hf.trainers.BpeTrainer, special, metaspace=False)
    tokenizer.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    save_tokenizer(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    return {"vocab_size": tokenizer.get_vocab_size()}


def pieces(texts: list[str], size: int) -> bytes:
    """Trains a SentencePiece model."""
    model = io.BytesIO()
    options = {"vocab_size": size, "hard_vocab_limit": False, "character_coverage": 1.0, "minloglevel": 9}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
    return model.getvalue()


def marian(folder: Path) -> torch.nn.Module:
    """Two SentencePiece models with one vocabulary; </s> is 0, and padding, the last one, starts the decoder."""
    models = {"source": pieces(TEXTS, 40), "target": pieces([text.upper() for text in TEXTS], 40)}
    names = ["</s>", "<unk>", ">>fr<<"]
    for side, model in models.items():
        (folder / f"{side}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        names += [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    names = [*dict.fromkeys(names), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    pad = len(names) - 1
    ids = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad, "forced_eos_token_id": None}
    ids |= {"bos_token_id": 0}
    config = {**MARIAN, **ids, "vocab_size": len(names), "decoder_vocab_size": len(names), "scale_embedding": True}
    return save(folder, "MarianMTModel", config, **ids, bad_words_ids=[[pad]], num_beams=3, max_length=12)


def bert(folder: Path) -> torch.nn.Module:
    """A classifier of three labels."""
    labels = {0: "bad", 1: "good", 2: "neither"}
    return save(folder, "BertForSequenceClassification", word_pieces(folder) | {"id2label": labels})


def bert_masked_lm(folder: Path) -> torch.nn.Module:
    """A masked language model with a tied head."""
    return save(folder, "BertForMaskedLM", word_pieces(folder))


def word_pieces(folder: Path) -> dict:
    """Writes `vocab.txt` alone, with [PAD] as the second token; returns the config of a BERT with its vocabulary."""
    tokenizer = hf.Tokenizer(hf.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = hf.trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text.lower() for text in TEXTS], trainer)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{name}\n" for name, _ in vocab))
    return {**SIZES, "vocab_size": len(vocab), "max_position_embeddings": 32, "pad_token_id": 1}


MAKERS = {"gpt2": gpt2, "llama": llama, "t5": t5, "marian": marian, "bert": bert, "bert_masked_lm": bert_masked_lm}
