"""Tokenizers: conversion between text and token ids."""

from tformer_jax.data.tokenizers.base import FIRST, Tokenizer, ordinary, token_texts
from tformer_jax.data.tokenizers.dropout import BpeDropout, is_bpe
from tformer_jax.data.tokenizers.extended import ExtendedTokenizer
from tformer_jax.data.tokenizers.normalization import normalizer, signature
from tformer_jax.data.tokenizers.pair import Tokenizers, from_json
from tformer_jax.data.tokenizers.training import train_tokenizers

__all__ = [
    "FIRST",
    "BpeDropout",
    "ExtendedTokenizer",
    "Tokenizer",
    "Tokenizers",
    "from_json",
    "is_bpe",
    "normalizer",
    "ordinary",
    "signature",
    "token_texts",
    "train_tokenizers",
]
