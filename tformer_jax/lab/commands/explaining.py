"""What `scripts/explain.py --run` computes with a trained run."""

import functools
from collections.abc import Sequence
from typing import Any

import tformer_jax as tj
from tformer_jax.base.errors import UserError
from tformer_jax.cli import watching
from tformer_jax.data.characters import is_blank
from tformer_jax.data.tokenizers import Tokenizer, token_texts
from tformer_jax.inference.score import Scored
from tformer_jax.lab.explain.search import BEAMS, STEPS
from tformer_jax.lab.explain.topic import MAX_TOKENS, Example
from tformer_jax.lab.explain.trained import TrainedFigures
from tformer_jax.report.attention import visible
from tformer_jax.report.run import load_all

Scores = tuple[Sequence[str], Scored]


def default_text(run: tj.Run, otherwise: str) -> str:
    """Returns the first held-out text of a run that has few enough tokens for a page, or the beginning of another."""
    (found,) = load_all([run.path])
    texts = found.outputs[found.split].sources if found.split else []
    tokenizer = run.tokenizers.source if run.config.model.family == "seq2seq" else run.tokenizers.target
    limit = min(MAX_TOKENS, run.config.model.max_length - tokenizer.special.added_to_side)
    short = (text for text in texts if 3 < len(tokenizer.encode(text)) < min(MAX_TOKENS // 2, limit + 1))
    words = otherwise.split()
    while len(tokenizer.encode(" ".join(words))) > limit:
        words.pop()
    return next(short, " ".join(words))


def trained_example(run: tj.Run, text: str, target: str | None) -> tuple[Example, TrainedFigures]:
    """Returns the tokens of the figures, and what the run computes for them.

    Args:
        target: None: the translation by the run; for other models, the tokens of the text reversed.

    Raises:
        UserError: a text has too few or too many tokens.
    """
    translates = run.config.model.family == "seq2seq"
    if target is not None and not translates:
        raise UserError(f"--target: {run.path} is not a translator; leave it out")
    translated = run.translate([text])[0] if translates and target is None else None
    target = target if translated is None else translated
    prompt = (text, "") if run.config.model.prefix_lm else text
    (found,) = run.watch([(text, target) if translates else prompt])
    tokens = {stack: list(map(visible, texts)) for stack, texts in watching.read_tokens(run, found).items()}
    source = pieces(run.tokenizers.source if translates else run.tokenizers.target, text)
    other = source[::-1] if target is None else pieces(run.tokenizers.target, target)
    example = Example.checked(source, other, "of the run's tokenizer", translated)
    return example, TrainedFigures(run.path.name, found, tokens, outputs(run, text))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the texts of the tokens of a text, without the special tokens around it."""
    return list(map(visible, token_texts(tokenizer, tokenizer.encode(text))))


def outputs(run: tj.Run, text: str) -> list[Scores]:
    """Returns the tokens of the outputs of beam search with their log-probabilities, best first; encoders have none."""
    family = run.config.model.family
    if family not in ("seq2seq", "decoder_lm"):
        return []
    settings: dict[str, Any] = {"strategy": "beam", "beams": BEAMS}
    if family == "decoder_lm":
        fewest = min(run.config.decode.min_new_tokens, STEPS)
        settings |= {"max_new_tokens": STEPS, "min_new_tokens": fewest, "prefix": ""}
    (found,) = run.outputs([text], BEAMS, **settings)
    scored = run.score([(text, one.text) for one in found if not is_blank(one.text)])
    name = functools.partial(token_texts, run.tokenizers.target)
    return [(list(map(visible, name(one.tokens))), one) for one in scored if one.tokens]
