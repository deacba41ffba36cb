"""Converts exported folders to CTranslate2's format by its own converter, which misreads four kinds of models.

It makes every Marian start from a zero embedding without the last token of the vocabulary, as Marian-NMT's own models
do, and it divides the logits of a T5 with a head of its own, which transformers does not. It makes every mBART-50
start from the end token, whatever config.json says, and refuses a BART or mBART with more rows than tokens.
"""

from pathlib import Path
from typing import Any

from tformer_jax.base.checks import require
from tformer_jax.interop.files import read_config

QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")


def check_installed() -> None:
    """Raises `UserError` if CTranslate2, or a library with which it reads checkpoints, is not installed."""
    require("writing CTranslate2's format", ("ctranslate2", "torch", "transformers"), "parity")


def convert(folder: Path, output: Path, quantization: str | None = None) -> None:
    """Writes `model.bin`, `config.json` and the vocabularies of a checkpoint folder to a new folder.

    Args:
        quantization: one of `QUANTIZATIONS`; None: the dtype of the checkpoint.

    Raises:
        ValueError: there is no converter for the architecture.
    """
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.converters import transformers as loaders

    hf = read_config(folder)

    class Converter(TransformersConverter):
        """The library's converter without its four mistakes."""

        def load_model(self, *arguments: Any, **options: Any) -> Any:
            model = super().load_model(*arguments, **options)
            model.config.tie_word_embeddings = hf.get("tie_word_embeddings", model.config.tie_word_embeddings)
            return model

        def load_tokenizer(self, *arguments: Any, **options: Any) -> Any:
            return _with_all_names(super().load_tokenizer(*arguments, **options), hf)

        def _load(self) -> Any:
            spec = _read_marian(folder, loaders) if hf["model_type"] == "marian" else super()._load()
            if getattr(spec.config, "decoder_start_token", None) is not None:
                spec.config.decoder_start_token = _start_token(folder, hf["decoder_start_token_id"])
            return spec

    Converter(str(folder)).convert(str(output), quantization=quantization)


def _start_token(folder: Path, number: int) -> str:
    """Returns the name of the token with which inputs of the decoder start."""
    import transformers

    name: str = transformers.AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens([number])[0]
    return name


def _with_all_names(tokenizer: Any, hf: dict[str, Any]) -> Any:
    """Adds names of the rows that a tokenizer lacks, as CTranslate2's converters of other architectures do."""
    if hf["model_type"] in ("bart", "mbart", "marian"):
        tokenizer.add_tokens([f"<extra_id_{i}>" for i in range(hf["vocab_size"] - len(tokenizer))])
    return tokenizer


def _read_marian(folder: Path, loaders: Any) -> Any:
    """Returns CTranslate2's description of a Marian model, as a BART without a norm of the embeddings."""
    import torch
    import transformers

    model = transformers.MarianMTModel.from_pretrained(folder, dtype="auto")
    tokenizer = _with_all_names(transformers.AutoTokenizer.from_pretrained(folder), read_config(folder))
    model.config.normalize_before = model.config.normalize_embedding = False
    with torch.no_grad():
        return loaders.BartLoader()(model, tokenizer)
