"""Sizes of the page pool of an engine."""

from collections.abc import Sequence

from tformer_jax.config import Config, DecodeConfig, ModelConfig
from tformer_jax.inference.batching import power_of_two

PAGE_SIZE = 16
"""Number of tokens per page."""
EXPECTED_TOKENS = 128
"""Number of tokens of an output that memory is first allocated for if `decode.max_new_tokens` is None."""


def max_new_tokens(model: ModelConfig, decode: DecodeConfig, prompt: int) -> int:
    """Returns the maximum number of tokens to generate.

    Args:
        prompt: number of decoder inputs before them: the tokens of the prompt, or 1 (BOS) for a translation.
    """
    room = model.max_length - (0 if model.model_class.reads_source else prompt)
    return room if decode.max_new_tokens is None else min(decode.max_new_tokens, room)


def expected_tokens(model: ModelConfig, decode: DecodeConfig, prompt: int) -> int:
    """Returns the number of tokens to allocate memory for: `max_new_tokens`, at most `EXPECTED_TOKENS` by default."""
    limit = max_new_tokens(model, decode, prompt)
    return min(limit, EXPECTED_TOKENS) if decode.max_new_tokens is None else limit


def row_pages(cfg: Config, prompt: int) -> int:
    """Returns the number of pages that a row with the settings `cfg.decode` first takes."""
    slots = prompt + expected_tokens(cfg.model, cfg.decode, prompt) * cfg.decode.width
    return -(-slots // PAGE_SIZE)


def pool_pages(cfg: Config, prompts: Sequence[int], *, max_rows: int, outputs: int) -> int:
    """Returns the number of pages that an engine needs so that no row waits for pages.

    Longer outputs than `expected_tokens` need more; see `Engine`. The number is a power of two, so that few pool sizes
    are compiled, but at most enough for `max_rows` rows of maximum length.

    Args:
        prompts: the number of tokens of each prompt.
        max_rows: maximum number of rows that run at a time.
        outputs: number of outputs of each prompt.
    """
    rows = 1 if cfg.decode.strategy == "beam" else outputs
    longest = sorted((row_pages(cfg, prompt) for prompt in prompts for _ in range(rows)), reverse=True)[:max_rows]
    full = -(-(cfg.model.max_length + 1) * cfg.decode.width // PAGE_SIZE)
    return min(power_of_two(max(sum(longest), 1)), max_rows * full)
