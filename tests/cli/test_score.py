"""The fields that `score.py` reads, and the perplexity that it prints."""

import math

import pytest

from tests.helpers import tiny
from tformer_jax.base.errors import UserError
from tformer_jax.cli import score
from tformer_jax.data.tokenizers.simple import WordTokenizer
from tformer_jax.inference.scores import Scored


@pytest.mark.parametrize(("nats", "shown"), [(2 * math.log(5), "5"), (1418.0, "8.218e+307"), (1420.0, "inf")])
def test_perplexities_beyond_the_largest_number_are_infinite(nats, shown):
    assert str(score.Totals(nats, tokens=2, texts=1)) == f"perplexity {shown} (tokens: 2, texts: 1)"


def test_blank_lines_do_not_count_as_texts():
    totals = score.Totals()
    for tokens in ([4, 5], [], [6], []):
        totals.add(Scored(tokens, [-1.0] * len(tokens)), 0)
    assert str(totals) == "perplexity 2.718 (tokens: 3, texts: 2, texts without a scored token: 2)"


def test_unknown_tokens_are_counted():
    totals = score.Totals()
    totals.add(Scored([4, 3, 3, 2], [-1.0, -1.0, -1.0, -1.0]), 2)
    shown = "perplexity 2.718 (tokens: 4, texts: 1, unknown tokens: 2, whose texts do not affect scores)"
    assert str(totals) == shown
    words = WordTokenizer(["a"])
    actual = score.score_fields(Scored(words.encode("a b c"), [-1.0, -2.0, -3.0]), words, per_token=False)
    assert actual == {"log_probability": -6.0, "tokens": 3, "unknown_tokens": 2}
    actual = score.score_fields(Scored(words.encode("a b"), [-1.0, -2.0]), words, per_token=True)
    assert (actual["tokens"], actual["unknown_tokens"]) == (["a", "<unk>"], 1)


@pytest.mark.parametrize(
    ("family", "flag", "read"),
    [
        ("seq2seq", "--field", "--source-field and --target-field"),
        ("decoder_lm", "--source-field", "--field"),
        ("decoder_lm", "--target-field", "--field"),
    ],
)
def test_fields_that_are_not_read_are_rejected(family, flag, read):
    options = score.parser().parse_args(["--run", "run", flag, "x"])
    with pytest.raises(UserError, match=f"^{flag} has no effect for model.family='{family}'; write {read}$"):
        score.text_fields(options, tiny(family))
