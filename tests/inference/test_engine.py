"""Outputs of the engine do not depend on other requests."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from tests.helpers import rest_slow
from tests.inference.beam_search import best_continuations, best_translations
from tests.inference.engines import (
    BEAM,
    GREEDY,
    LETTERS,
    LONG,
    SAMPLE,
    SEEDS,
    TEXTS,
    alone,
    endless,
    engine,
    finish,
    models,
    plain,
    submit,
)
from tests.inference.jitted_continuation import continue_text
from tformer_jax.base.errors import UserError
from tformer_jax.inference.batching import pad_rows
from tformer_jax.inference.engine import Request, compiled
from tformer_jax.inference.engine import lane as lanes
from tformer_jax.lab.benchmarks.jitted_loop import row_keys
from tformer_jax.special_tokens import EOS, PAD


@pytest.fixture(scope="module", params=["seq2seq", "decoder_lm"])
def trained(request):
    return plain(request.param)


EACH = {
    f"{family}-{decode.strategy}": (family, decode)
    for family, decode in (("seq2seq", BEAM), ("decoder_lm", SAMPLE), *itertools.product(SEEDS, (GREEDY, SAMPLE, BEAM)))
}


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(EACH, 1))
def test_calls_keep_the_types_of_the_state(case):
    """Else each function would be compiled once more, for the types after the first call."""
    family, decode = case
    served = engine(plain(family))
    submit(served, "abc", decode, num_outputs=2)
    finish(served)
    (lane,) = served._lanes.values()
    initial = compiled.empty_state(lane.plan, lane._size)
    assert jax.tree.map(jax.typeof, jax.tree.leaves(lane.state)) == jax.tree.map(jax.typeof, jax.tree.leaves(initial))


@pytest.mark.long
@pytest.mark.parametrize("case", rest_slow(EACH, 2))
def test_outputs_do_not_depend_on_other_requests(case):
    family, decode = case
    trained = plain(family)
    served = engine(trained)
    numbers = [submit(served, text, decode, seed=3, index=index) for index, text in enumerate(TEXTS)]
    actual = finish(served)
    expected = [alone(trained, text, decode, 3, index) for index, text in enumerate(TEXTS)]
    assert [actual[number, 0][0] for number in numbers] == expected
    assert len(set(expected)) > 1


VARIANTS = {
    "rotary, windows": {"position": "rotary", "head_dim": 4, "window": 3, "layer_pattern": ("window", "full")},
    "learned, post, GQA": {"position": "learned", "norm_placement": "post", "num_kv_heads": 2},
    "ALiBi": {"position": "alibi"},
    "prefix LM": {"prefix_lm": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", rest_slow(VARIANTS, 1))
def test_prompts_in_chunks_and_in_shared_pages(changes, monkeypatch):
    monkeypatch.setattr(lanes, "PROMPT_CHUNK", 8)
    trained = models("decoder_lm", decoder_layers=2, **changes)
    served = engine(trained)
    long = "abcdefgabcdefgabcdefg"
    texts = [long, long + "ab", "ga", long, long[:17] + "a"]
    decode = dataclasses.replace(GREEDY, cache_dtype="float32")
    numbers = [submit(served, text, decode) for text in texts]
    actual = finish(served)
    _, model, params = trained
    rows = pad_rows([LETTERS.encode(text) for text in texts], len(texts), 32, pad_left=True)
    outputs = continue_text(model, params, rows, row_keys(0, np.arange(5)), length=7, cfg=decode)
    assert [actual[number, 0][0] for number in numbers] == [
        LETTERS.decode(row, unknown="<unk>") for row in np.asarray(outputs)
    ]


@pytest.mark.long
@pytest.mark.parametrize("text", rest_slow(["abcdefgabcdefgabcd", "abc"], 1))
@pytest.mark.parametrize("trained", rest_slow(["decoder_lm", "seq2seq"], 1), indirect=True)
def test_samples_of_one_prompt_share_it(trained, text):
    served = engine(trained)
    number = submit(served, text, SAMPLE, seed=5, index=7, num_outputs=3)
    events = served.step()
    full = 3 * -(-(len(text) + 7) // 16)
    assert trained[0].model.family == "seq2seq" or served.pages_used == full - 2 * ((len(text) - 1) // 16)
    actual = finish(served, events)
    outputs = [actual[number, sample][0] for sample in range(3)]
    assert outputs == [alone(trained, text, SAMPLE, 5, 7 + sample) for sample in range(3)]
    assert len(set(outputs)) > 1


@pytest.mark.slow
@settings(max_examples=6)
@given(data=st.data())
def test_arrivals_and_cancellations_do_not_change_other_outputs(trained, data):
    """Requests of all kinds arrive at any time, and some are canceled."""
    pages, seconds = data.draw(st.sampled_from([None, 9])), data.draw(st.sampled_from([0.0, math.inf]))
    served, events = engine(trained, pages=pages, seconds=seconds), []
    asked: dict[int, tuple] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "cancel"]))
        if action == "submit":
            text, decode = data.draw(st.sampled_from(TEXTS)), data.draw(st.sampled_from([GREEDY, SAMPLE, BEAM]))
            seed = data.draw(st.integers(0, 2))
            asked[submit(served, text, decode, seed=seed)] = text, decode, seed
        elif action == "step":
            events += served.step()
        elif asked:
            number = data.draw(st.sampled_from(sorted(asked)))
            served.cancel(number)
            if not any(event.request == number and event.finish for event in events):
                del asked[number]
                events = [event for event in events if event.request != number]
    actual = finish(served, events)
    assert {number for number, _ in actual} == set(asked)
    for number, (text, decode, seed) in asked.items():
        assert actual[number, 0][0] == alone(trained, text, decode, seed), (text, decode)


@pytest.mark.slow
def test_a_released_row_does_not_write_to_reused_pages():
    """All pages of a canceled row are given to the next request, which takes another row."""
    trained, _ = endless()
    served = engine(trained, max_rows=4, pages=2)
    first, second = (submit(served, text, GREEDY) for text in ("abc", "g"))
    served.step()
    for request in (second, first):
        served.cancel(request)
    number = submit(served, "abcabcabc", GREEDY)
    assert finish(served)[number, 0][0] == alone(trained, "abcabcabc", GREEDY)


@pytest.mark.long
@pytest.mark.parametrize("trained", rest_slow(["seq2seq", "decoder_lm"], 1), indirect=True)
def test_beam_search_reports_outputs_with_scores(trained):
    cfg, model, params = trained
    served = engine(trained)
    number = submit(served, "abc", BEAM, num_outputs=2)
    actual = finish(served)
    search = best_translations if cfg.model.family == "seq2seq" else best_continuations
    ids = LETTERS.encode("abc")
    rows = np.array([[*ids, EOS] if cfg.model.family == "seq2seq" else [PAD, *ids]])
    best = search(model, params, rows, length=7, cfg=BEAM)
    for sample in range(2):
        text, event = actual[number, sample]
        assert text == LETTERS.decode(np.asarray(best.tokens)[0, sample], unknown="<unk>")
        assert event.score == pytest.approx(float(best.scores[0, sample]), rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["", "ba"])
def test_the_score_is_the_sum_of_log_probabilities_without_forced_tokens(prefix):
    decode = dataclasses.replace(GREEDY, prefix=prefix)
    trained = cfg, _, params = models("decoder_lm", seed=1)  # whose output is made of letters
    served = engine(trained)
    number, unscored = (submit(served, "abcde", decode, scored=scored) for scored in (True, False))
    actual = finish(served)
    text, event = actual[number, 0]
    assert text.startswith(prefix)
    assert actual[unscored, 0] == (text, event._replace(request=unscored, score=None))
    ids = LETTERS.encode("abcde") + LETTERS.encode(text)
    tokens = np.array([ids + [EOS] * (event.finish == "stop")])
    log_p = np.log(oracles.softmax(oracles.decoder_lm(oracles.f64(params), cfg.model, tokens, tokens != PAD)))[0]
    assert event.tokens == tokens.shape[1] - 5
    expected = sum(log_p[index - 1, tokens[0, index]] for index in range(5 + len(prefix), tokens.shape[1]))
    assert event.score == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("most", rest_slow([32, 3], 1))
@pytest.mark.parametrize("case", rest_slow(EACH, 2))
def test_outputs_do_not_depend_on_steps_per_call(case, most, monkeypatch):
    """Also for requests that arrive later, and with one that is canceled."""
    family, decode = case
    trained = plain(family)
    monkeypatch.setattr(lanes, "MAX_STEPS", most)

    def run(seconds: float):
        served, events = engine(trained, seconds=seconds), []
        numbers = [
            submit(served, text, decode, seed=3, index=index, scored=True) for index, text in enumerate(TEXTS[:4])
        ]
        leaves = submit(served, "gg", dataclasses.replace(decode, max_new_tokens=LONG - 2))
        events += served.step()
        numbers += [submit(served, text, decode, seed=3, scored=True) for text in TEXTS[4:]]
        for _ in range(6):
            events += served.step()
        served.cancel(leaves)
        events = [event for event in events if event.request != leaves]
        actual, calls = finish(served, events), len(events)
        texts, ends = zip(*(actual[number, 0] for number in numbers), strict=True)
        return texts, [(end.finish, end.tokens) for end in ends], [end.score for end in ends], calls

    *single, scores, calls = run(0.0)
    *many, found_scores, fewer_calls = run(math.inf)
    assert many == single
    assert found_scores == pytest.approx(scores, rel=1e-5)
    assert decode is BEAM or fewer_calls < calls
    assert len(set(single[0])) > 1


@pytest.mark.long
def test_a_call_ends_when_a_row_is_free_for_pending_requests(monkeypatch):
    """One of three rows ends after two tokens: the fourth request starts before the other rows end."""
    trained, _ = endless()
    served = engine(trained, seconds=math.inf)
    lengths = (2, 7, 7, 7)
    numbers = [submit(served, "abc", dataclasses.replace(GREEDY, max_new_tokens=most)) for most in lengths]
    first = served.step()
    assert [(event.request, event.tokens, event.finish) for event in first] == [
        (numbers[0], 2, "length"),
        (numbers[1], 2, None),
        (numbers[2], 2, None),
    ]
    assert [(event.request, event.tokens) for event in served.step()] == [(number, 7) for number in numbers[1:]]
    assert served.idle


@pytest.mark.long
@pytest.mark.parametrize("seconds", rest_slow([math.inf, 0.0], 1))
def test_a_stop_text_ends_an_output_and_frees_its_row(seconds):
    trained, output = endless()
    served = engine(trained, max_rows=1, seconds=seconds)
    stop = output[2:4]
    first = submit(served, "abc", dataclasses.replace(GREEDY, stop=(stop,)))
    second = submit(served, "abc", GREEDY)
    actual = finish(served)
    assert actual[first, 0][0] == output[: output.index(stop)]
    assert actual[first, 0][1].finish == "stop"
    assert actual[first, 0][1].tokens == output.index(stop) + len(stop)
    assert actual[second, 0][0] == output
    assert actual[second, 0][1].finish == "length"


@pytest.mark.long
def test_a_beam_ends_with_the_token_that_completes_a_stop_text():
    """Regression test: its tokens and their number included those after the stop text."""
    served = engine(endless()[0])
    whole = submit(served, "abc", BEAM)
    output = finish(served)[whole, 0][0]
    stop = output[2]
    number = submit(served, "abc", dataclasses.replace(BEAM, stop=(stop,)))
    text, event = finish(served)[number, 0]
    length = output.index(stop) + 1
    assert (text, event.finish) == (output[: length - 1], "stop")
    assert list(event.ids) == LETTERS.encode(output[:length])
    assert event.tokens == length


@pytest.mark.long
def test_rules_and_limits_apply_per_request():
    trained, output = endless()
    served = engine(trained)
    forbids = dataclasses.replace(GREEDY, forbidden=(output[0],), max_new_tokens=3)
    first = submit(served, "abc", forbids)
    second = submit(served, "abc", dataclasses.replace(GREEDY, max_new_tokens=LONG))
    actual = finish(served)
    assert output[0] not in actual[first, 0][0] and len(actual[first, 0][0]) == 3
    assert len(actual[second, 0][0]) == LONG - 3


@pytest.mark.long
def test_pages_limit_concurrent_requests():
    trained, _ = endless()
    served = engine(trained, max_rows=4, pages=2)
    long = dataclasses.replace(GREEDY, max_new_tokens=14)
    numbers = [submit(served, "abc", long) for _ in range(3)]
    events = served.step()
    assert (served.running, served.pending, served.pages_used) == (1, 2, 2)
    actual = finish(served, events)
    assert len({actual[number, 0][0] for number in numbers}) == 1
    with pytest.raises(UserError, match="may need 3 pages of 16 tokens, and the engine has 2: request fewer"):
        submit(served, "abc", dataclasses.replace(GREEDY, max_new_tokens=36))


@pytest.mark.long
def test_requests_that_need_pages_in_use_do_not_end_a_call():
    """A row is free for the second request, but its pages are not: the first one gets all of its 20 tokens."""
    trained, _ = endless()
    served = engine(trained, max_rows=4, pages=2, seconds=math.inf)
    for _ in range(2):
        submit(served, "abc", dataclasses.replace(GREEDY, max_new_tokens=20))
    assert [event.tokens for event in served.step()] == [20]


@pytest.mark.parametrize(("beams", "width"), [(1, 1), (2, 2), (3, 4), (5, 5), (6, 6), (7, 8), (9, 16)])
def test_the_beam_width_of_a_lane_is_that_of_the_config_or_a_power_of_two(beams, width):
    cfg, *rest = plain("seq2seq")
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(BEAM, beams=6 if beams == 6 else 5))
    served = engine((cfg, *rest), few_shapes=True)
    submit(served, "abc", dataclasses.replace(BEAM, beams=beams))
    assert [kind[0].beams for kind in served._queues] == [width]


@pytest.mark.slow
@pytest.mark.parametrize("beams", rest_slow([(3, 4), (3, 4, 2)], 1))
@pytest.mark.parametrize("trained", rest_slow(["decoder_lm", "seq2seq"], 1), indirect=True)
def test_rounding_beam_widths_does_not_change_outputs(trained, beams):
    """Widths 3 and 4 share a compiled step."""
    served = engine(trained, few_shapes=True)
    widths = [dataclasses.replace(BEAM, beams=width, max_new_tokens=4) for width in beams]
    numbers = [submit(served, "gf", decode, num_outputs=2) for decode in widths]
    actual = finish(served)
    assert {kind[0].beams for kind in served._lanes} == {2 if width == 2 else 4 for width in beams}
    assert len(served._lanes) == len(beams) - 1
    for number, decode in zip(numbers, widths, strict=True):
        alone_engine = engine(trained)
        other = submit(alone_engine, "gf", decode, num_outputs=2)
        expected = finish(alone_engine)
        for sample in range(2):
            (text, event), (wanted, single) = actual[number, sample], expected[other, sample]
            assert text == wanted
            assert event.score == pytest.approx(single.score, rel=1e-5)


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_compiled(trained):
    """For any lengths of prompts and outputs, and any number of requests admitted together."""
    served = engine(trained, few_shapes=True, max_rows=6)
    decode = dataclasses.replace(GREEDY, max_new_tokens=33)
    functions = [compiled.admit, compiled.read_prompts, compiled.advance, compiled.resize, compiled.empty_state]
    served.warm_up(decode)
    before = [function._cache_size() for function in functions]
    for texts in (["a"], TEXTS, ["abcdefg" * 5, "ga"], ["abcdefg" * 2]):
        for text in texts:
            submit(served, text, dataclasses.replace(decode, temperature=0.5, strategy="sample"))
        finish(served)
    assert [function._cache_size() for function in functions] == before
    number = submit(served, "abc", GREEDY)
    assert finish(served)[number, 0][0] == alone(trained, "abc", GREEDY)


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (Request((), GREEDY), "the request has 0 tokens; the model takes 1 to"),
        (Request((5,), BEAM, num_outputs=4), "4 outputs are more than decode.beams=3"),
        (Request((5,), SAMPLE, num_outputs=4), "4 outputs are more than --max-rows 3"),
        (
            Request((5,), dataclasses.replace(GREEDY, forbidden=("?",))),
            "'\\?' cannot be encoded with this vocabulary",
        ),
    ],
)
def test_requests_that_can_never_be_served_are_refused(trained, refused, sentence):
    served = engine(trained)
    with pytest.raises(UserError, match=sentence):
        served.submit(refused)
    assert served.idle


def test_requests_with_more_tokens_than_the_model_reads_are_refused(trained):
    """A language model needs one position for an output."""
    most = LONG if trained[0].model.family == "seq2seq" else LONG - 1
    served = engine(trained)
    served.submit(Request((5,) * most, GREEDY))
    with pytest.raises(UserError, match=f"the request has {most + 1} tokens; the model takes 1 to {most}"):
        served.submit(Request((5,) * (most + 1), GREEDY))
