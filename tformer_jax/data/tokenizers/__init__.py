"""Tokenizers: conversion between text and token ids."""

from tformer_jax.data.tokenizers.base import (
    FIRST,
    UNKNOWN_MARK,
    Decoder,
    Tokenizer,
    ordinary,
    same_tokens,
    token_texts,
)
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.dropout import BpeDropout, is_bpe
from tformer_jax.data.tokenizers.extended import ExtendedTokenizer, mask_of
from tformer_jax.data.tokenizers.normalization import normalizer, signature
from tformer_jax.data.tokenizers.pair import Tokenizers, from_json
from tformer_jax.data.tokenizers.training import train_tokenizers

__all__ = [
    "FIRST",
    "UNKNOWN_MARK",
    "BpeDropout",
    "Decoder",
    "ExtendedTokenizer",
    "Tokenizer",
    "Tokenizers",
    "from_json",
    "is_bpe",
    "load_checkpoint_tokenizers",
    "mask_of",
    "normalizer",
    "ordinary",
    "same_tokens",
    "signature",
    "token_texts",
    "train_tokenizers",
]
