"""The engine at the limits of the model: the longest inputs, few positions, and requests beyond them."""

import dataclasses

import pytest

from tests.helpers import rest_slow
from tests.inference.engines import GREEDY, LONG, encode, engine, finish, models, plain, submit
from tests.inference.test_detokenization import llama
from tformer_jax.base.errors import UserError
from tformer_jax.config import DecodeConfig
from tformer_jax.inference.detokenization import TextStream
from tformer_jax.inference.engine import Request
from tformer_jax.inference.engine.events import token_event
from tformer_jax.inference.engine.lane import NewTokens, RequestRow
from tformer_jax.inference.forced import FirstTokens


@pytest.mark.long
@pytest.mark.parametrize("family", rest_slow(["seq2seq", "decoder_lm"], 1))
def test_learned_positions_suffice_for_the_longest_inputs(family):
    """`LONG` is no power of two, to which inputs are padded; the table has no more positions."""
    assert LONG & (LONG - 1)
    served = engine(models(family, position="learned"), max_rows=1)
    served.warm_up(GREEDY)
    number = submit(served, "abcdefg" * 5, GREEDY)
    _, last = finish(served)[number, 0]
    room = LONG - 35 if family == "decoder_lm" else LONG
    assert last.finish == "stop" or last.tokens == min(GREEDY.max_new_tokens, room)


PAIRS = DecodeConfig(strategy="beam", beams=16, max_new_tokens=2)  # all outputs of a token are searched


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow([(PAIRS, {"beams": LONG + 1}), (GREEDY, {"lookup_tokens": LONG})], 1))
def test_a_step_reads_more_tokens_than_there_are_positions(case):
    """Regression test: learned positions refused so many beams or drafts, although each token has its position."""
    decode, changes = case
    served = engine(models("decoder_lm", position="learned"))
    few, many = (submit(served, "abcabcabc", each) for each in (decode, dataclasses.replace(decode, **changes)))
    actual = finish(served)
    assert actual[few, 0][0] == actual[many, 0][0]


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (Request((5, 11), GREEDY), "token id 11 is not in 0, ..., 10"),
        (Request((5, -1), GREEDY), "token id -1 is not in 0, ..., 10"),
        (Request((5,), GREEDY, seed=-1), "seed=-1: must be an integer from 0 to 4294967295"),
        (Request((5,), GREEDY, seed=2**32), "seed=4294967296: must be an integer from 0 to"),
        (
            Request(encode("a" * (LONG - 2), "decoder_lm"), dataclasses.replace(GREEDY, prefix="abcde")),
            "decode.prefix='abcde' has 5 tokens, but only 2 fit after the prompt: shorten one of them",
        ),
    ],
)
def test_requests_beyond_the_limits_are_refused(refused, sentence):
    served = engine(plain("decoder_lm"))
    with pytest.raises(UserError, match=sentence):
        served.submit(refused)
    assert served.idle


@pytest.mark.slow
def test_outputs_that_beam_search_did_not_find():
    """The prefix is the only output."""
    decode = DecodeConfig(strategy="beam", beams=2, prefix="abc", max_new_tokens=3)
    served = engine(plain("decoder_lm"))
    number = submit(served, "abc", decode, num_outputs=2)
    actual = finish(served)
    assert [(actual[number, n][0], actual[number, n][1].score) for n in range(2)] == [("abc", 0.0), ("", None)]


def test_a_stop_text_in_the_last_bytes_of_an_output():
    """Llama's bytes are held back until the output ends."""
    tokenizer = llama()
    letter, newline = tokenizer.encode("a")[-1], tokenizer.encode("\n")[-1]
    assert newline in tokenizer.fallback_bytes
    decode = DecodeConfig(stop=("\n",))
    stream = TextStream(tokenizer, decode.stop)
    row = RequestRow(0, 0, decode, [letter], None, 2, 2, 2, (0, 0), stream, FirstTokens(), 1, scored=False)
    event = token_event(row, NewTokens([letter, newline], [0.0, 0.0], done=True))
    assert (event.text, event.finish) == ("a", "stop")
