"""Tokenizers: conversion between text and token ids."""

from tformer_jax.data.tokenizers.base import FIRST, MASK, SENTINEL_TOKENS, UNKNOWN_MARK, Decoder, Tokenizer
from tformer_jax.data.tokenizers.files import NO_PLACEHOLDERS, Placeholders, Tokenizers, from_json
from tformer_jax.data.tokenizers.normalization import normalizer, signature
from tformer_jax.data.tokenizers.tokens import same_tokens, token_texts

__all__ = [
    "FIRST",
    "MASK",
    "NO_PLACEHOLDERS",
    "SENTINEL_TOKENS",
    "UNKNOWN_MARK",
    "Decoder",
    "Placeholders",
    "Tokenizer",
    "Tokenizers",
    "from_json",
    "normalizer",
    "same_tokens",
    "signature",
    "token_texts",
]
