"""With a draft, whatever it is, a model gives the outputs that it gives alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests import oracles
from tests.helpers import build, normal, rest_slow, tiny
from tformer_jax.config import ConfigError, DecodeConfig
from tformer_jax.inference import generate, speculative
from tformer_jax.inference.constraints import NO_RULES, Rules
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.special_tokens import BOS, EOS, PAD, UNK

LENGTH = 9
SOURCES = [[9, 8, 7, EOS], [6, 5, EOS], [], [4, 10, 9, 8, 5, EOS]]
PROMPTS = [[5, 6, 7], [4], [], [8, 9, 10, 4, 5]]
TWO = {"decoder_layers": 2, "output_bias": True}
WINDOWS = {"position": "rotary", "head_dim": 4, "window": 2, "layer_pattern": ("window", "full")}
LEARNED = {"position": "learned", "norm_placement": "post"}
ALIBI = {"position": "alibi", "num_kv_heads": 2, "norm": "rmsnorm"}
EXPERTS = {"position": "learned", "ffn": "moe", "num_experts": 4}
CASES = {
    "rotary, windows": ("decoder_lm", WINDOWS, 19, 2.0),
    "learned, post-norm": ("decoder_lm", LEARNED, 5, 1.0),
    "ALiBi, GQA, RMSNorm": ("decoder_lm", ALIBI, 23, 1.0),
    "prefix": ("decoder_lm", {"prefix_lm": True}, 23, 1.0),
    "experts": ("decoder_lm", EXPERTS, 21, 1.0),
    "translation, learned, post-norm": ("seq2seq", LEARNED, 15, 2.0),
    "translation, ALiBi, GQA, RMSNorm": ("seq2seq", ALIBI, 19, 1.0),
}
"""The family, its variant, and a seed and a bias of EOS with which rows end at different times."""
SAMPLING = {
    "temperature": {"temperature": 0.7},
    "top-k and top-p": {"temperature": 1.3, "top_k": 3, "top_p": 0.8},
    "min-p": {"temperature": 1.5, "min_p": 0.3},
}


def padded(rows, *, left: bool) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[PAD] * (width - len(row)) + row if left else row + [PAD] * (width - len(row)) for row in rows])


def biased(params, **biases: float):
    """With other output biases, by the names of tokens."""
    names = {"eos": EOS, "unk": UNK}
    tokens, values = jnp.array([names[name] for name in biases]), jnp.array(list(biases.values()))
    return {**params, "head": {**params["head"], "bias": params["head"]["bias"].at[tokens].set(values)}}


def noisy(params, scale: float, seed: int = 0):
    """Parameters that are nearly the same."""
    leaves, tree = jax.tree.flatten(params)
    noise = [normal(*leaf.shape, seed=seed + number) for number, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, [leaf + scale * one for leaf, one in zip(leaves, noise, strict=True)])


def drafts(params) -> dict:
    """Parameters of drafts of the model's own architecture, by how good they are."""
    return {
        "right": params,
        "wrong": biased(params, unk=1e4),
        "nearly right": noisy(params, 0.05),
        "often wrong": noisy(params, 0.3),
    }


def case(name: str):
    """A model that never gives what the wrong draft gives; its inputs; decoding with a draft, and without."""
    family, changes, seed, eos = CASES[name]
    model, params = build(tiny(family, **changes, **TWO), seed=seed)
    rows, *functions = (
        (SOURCES, speculative.translate, generate.translate)
        if family == "seq2seq"
        else (PROMPTS, speculative.continue_text, generate.continue_text)
    )
    return model, biased(params, unk=-1e4, eos=eos), rows, *functions


def logits_of(model, params, source=None, prompt_length=0):
    """float64 logits [V] after a list of tokens, by a full pass."""
    params = oracles.f64(params)

    def read(tokens: list[int]) -> np.ndarray:
        row = np.array([tokens])
        if source is None:
            prefix = [prompt_length] if model.cfg.prefix_lm else None
            logits = oracles.decoder_lm(params, model.cfg, row, row > PAD, prefix)
        else:
            of = np.array([source])
            logits = oracles.seq2seq(params, model.cfg, of, row, of > PAD, row > PAD)
        return logits[0, -1]

    return read


def greedy(read, tokens: list[int]) -> int:
    logits = read(tokens).copy()
    logits[[PAD, BOS]] = -np.inf
    return int(logits.argmax())


def by_full_passes(target, draft, prefix: list[int], room: int, k: int) -> tuple[list[int], int, int]:
    """The tokens, and how many were proposed and accepted, if everything is read again for each token."""
    output: list[int] = []
    proposed = accepted = 0
    while len(output) < room and EOS not in output:
        guesses: list[int] = []
        while len(guesses) < min(k, room - len(output) - 1) and EOS not in guesses:
            guesses.append(greedy(draft, prefix + output + guesses))
        proposed += len(guesses)
        for guess in guesses:
            output.append(greedy(target, prefix + output))
            if output[-1] != guess:
                break
            accepted += 1
        else:
            if EOS not in output:
                output.append(greedy(target, prefix + output))
    return output, proposed, accepted


def assert_like_full_passes(found, model, params, draft, its, rows, k: int):
    """Tokens, their log-probabilities and the counts of each row."""
    seq2seq, length = model.cfg.family == "seq2seq", found.tokens.shape[1]
    for number, row in enumerate(rows):
        prefix, limit = ([BOS], length) if seq2seq else (row, model.cfg.max_length - len(row))
        room = min(length, limit) if row else 0
        target, guess = (
            logits_of(of, p, row if seq2seq else None, len(row)) for of, p in ((model, params), (draft, its))
        )
        output, proposed, accepted = by_full_passes(target, guess, prefix, room, k)
        rest = [0] * (length - len(output))
        assert found.tokens[number].tolist() == output + rest
        assert (found.proposed[number], found.accepted[number]) == (proposed, accepted)
        log_p = [np.log(oracles.softmax(target(prefix + output[:place]))[token]) for place, token in enumerate(output)]
        np.testing.assert_allclose(found.log_probs[number], log_p + rest, rtol=1e-4, atol=1e-4)


def run(of, model, params, draft, its, tokens, *, seed=0, length=LENGTH, rules=NO_RULES, **decode):
    keys = jax.random.split(jax.random.key(seed), len(tokens))
    cfg = DecodeConfig(**{"draft_tokens": 3, **decode})
    return jax.device_get(of(model, params, draft, its, tokens, keys, length=length, cfg=cfg, rules=rules))


def alone(of, model, params, tokens, *, length=LENGTH, rules=NO_RULES, **decode) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), len(tokens))
    return np.asarray(of(model, params, tokens, keys, length=length, cfg=DecodeConfig(**decode), rules=rules))


@pytest.mark.parametrize("name", rest_slow(CASES.keys(), 2))
def test_greedy_outputs_are_those_of_the_model_alone(name):
    model, params, rows, decode, plain = case(name)
    tokens = padded(rows, left=decode is speculative.continue_text)
    expected = alone(plain, model, params, tokens)
    assert len(set((expected != PAD).sum(axis=1).tolist())) > 2
    rates = {}
    for kind, its in drafts(params).items():
        found = run(decode, model, params, model, its, tokens)
        np.testing.assert_array_equal(found.tokens, expected)
        assert_like_full_passes(found, model, params, model, its, rows, 3)
        rates[kind] = found.accepted.sum() / found.proposed.sum()
    assert (rates["right"], rates["wrong"]) == (1, 0)
    assert 0 < rates["nearly right"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 50])
def test_any_number_of_proposals_by_a_draft_of_another_architecture(k):
    model, params, rows, decode, _ = case("ALiBi, GQA, RMSNorm")
    draft, its = build(tiny("decoder_lm", dim=4, num_heads=2, **LEARNED), seed=3)
    found = run(decode, model, params, draft, its, padded(rows, left=True), draft_tokens=k)
    assert_like_full_passes(found, model, params, draft, its, rows, min(k, LENGTH - 1))


@pytest.mark.slow
def test_a_prompt_gets_what_its_own_length_leaves_room_for():
    """Learned positions beyond the model's are NaN."""
    model, params, _, decode, plain = case("learned, post-norm")
    params = biased(params, eos=-1e4)
    rows = [[5] * 12, [6] * 16, [7] * 15, [8] * 3, []]
    tokens = padded(rows, left=True)
    for its in (params, noisy(params, 0.05)):
        found = run(decode, model, params, model, its, tokens)
        np.testing.assert_array_equal(found.tokens, alone(plain, model, params, tokens))
        np.testing.assert_array_equal((found.tokens != PAD).sum(axis=1), [4, 0, 1, 9, 0])
        assert np.isfinite(found.log_probs).all()


@pytest.mark.slow
def test_experts_with_little_room_read_each_proposal_as_if_it_stood_alone():
    changes = {**EXPERTS, **TWO, "expert_capacity": 0.5}
    model, params = build(tiny("decoder_lm", **changes), seed=21)
    params = biased(params, unk=-1e4, eos=1.0)
    tokens = padded(PROMPTS, left=True)
    expected = alone(generate.continue_text, model, params, tokens)
    for its in drafts(params).values():
        found = run(speculative.continue_text, model, params, model, its, tokens)
        np.testing.assert_array_equal(found.tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_storage(dtype):
    model, params, rows, decode, plain = case("translation, ALiBi, GQA, RMSNorm")
    tokens = padded(rows, left=False)
    expected = alone(plain, model, params, tokens, cache_dtype=dtype)
    found = run(decode, model, params, model, noisy(params, 0.05), tokens, cache_dtype=dtype)
    np.testing.assert_array_equal(found.tokens, expected)


def test_the_model_is_called_once_for_all_that_is_accepted(monkeypatch):
    calls = []

    def counted(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return judge(*arguments)

    judge = speculative.judge
    monkeypatch.setattr(speculative, "judge", counted)
    model, params, rows, decode, _ = case("ALiBi, GQA, RMSNorm")
    params = biased(params, eos=-1e4)
    for its, expected in ((params, 3), (biased(params, unk=1e4), 11)):
        calls.clear()
        found = run(decode, model, params, model, its, padded(rows, left=True), length=11)
        jax.effects_barrier()
        np.testing.assert_array_equal((found.tokens != PAD).sum(axis=1), [11, 11, 0, 11])
        assert len(calls) == expected


@pytest.mark.slow
def test_rules_are_kept():
    rules = Rules(repetition=True, no_repeat_ngram=2, forbidden=((5,), (4, 6)), forced=(7, 4))
    settings = {"repetition_penalty": 1.5, "min_new_tokens": 5}
    model, params, rows, decode, plain = case("prefix")
    tokens = padded(rows, left=True)
    expected = alone(plain, model, params, tokens, rules=rules, **settings)
    assert (expected != alone(plain, model, params, tokens))[[0, 1, 3]].any(axis=1).all()
    for kind, its in drafts(params).items():
        found = run(decode, model, params, model, its, tokens, rules=rules, **settings)
        np.testing.assert_array_equal(found.tokens, expected)
        assert kind != "right" or (found.proposed == found.accepted).all()


def sequences(read, prefix: list[int], length: int, settings) -> dict[tuple[int, ...], float]:
    """The probability of each output of so many tokens, up to EOS, by full passes."""
    found = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, probability in found.items():
            if EOS in output:
                longer[output] = probability
                continue
            p = oracles.sampled(read([*prefix, *output]), **settings)
            longer |= {(*output, token): probability * p[token] for token in np.flatnonzero(p)}
        found = longer
    return found


def assert_distributed(samples: np.ndarray, expected: dict[tuple[int, ...], float]) -> None:
    """By a chi-square test; outputs that are expected fewer than ten times are counted together."""
    observed = dict.fromkeys(expected, 0)
    for sample in samples.tolist():
        observed[tuple(token for token in sample if token != PAD)] += 1
    pairs = np.array([(observed[output], probability * len(samples)) for output, probability in expected.items()])
    rare = pairs[:, 1] < 10
    pairs = np.concatenate([pairs[~rare], pairs[rare].sum(axis=0, keepdims=True)]) if rare.any() else pairs
    pairs = pairs[pairs[:, 1] > 0]
    chi_square = ((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1]).sum()
    assert len(pairs) > 10
    assert chi_square < stats.chi2.ppf(0.999, len(pairs) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decoder_lm", "seq2seq"])
@pytest.mark.parametrize("settings", SAMPLING.values(), ids=SAMPLING)
def test_samples_follow_the_distribution_of_the_model_alone(family, settings):
    small = {"vocab_size": 8, "output_bias": True} | ({"source_vocab_size": 8} if family == "seq2seq" else {})
    model, params = build(tiny(family, **small), seed=11)
    draft, its = build(tiny(family, dim=4, num_heads=2, **small, **LEARNED), seed=12)
    row, count, length = ([5, 7, 6, EOS] if family == "seq2seq" else [5, 7, 6]), 40_000, 3
    decode = speculative.translate if family == "seq2seq" else speculative.continue_text
    found = run(
        decode, model, params, draft, its, np.tile(row, (count, 1)), length=length, strategy="sample", **settings
    )
    assert 0.1 < found.accepted.sum() / found.proposed.sum() < 0.9
    read = logits_of(model, params, *((row,) if family == "seq2seq" else ()))
    expected = sequences(read, [BOS] if family == "seq2seq" else row, length, settings)
    assert_distributed(found.tokens, expected)


def test_what_is_judged_good_follows_p_whatever_q():
    """One proposal, then the token after it, against the product of both distributions."""
    p, q = jax.nn.softmax(2 * normal(3, 6, seed=1)), jax.nn.softmax(2 * normal(1, 6, seed=2))
    p, count = p.at[0, 3].set(0).at[0, 4].add(p[0, 3]), 40_000
    q = q.at[0, 1].set(0).at[0, 3].add(q[0, 1])
    keys = jax.random.split(jax.random.key(0), (2, count))
    tokens = jax.random.categorical(keys[0, 0], jnp.log(q[0]), shape=(count, 1)).astype(jnp.int32)
    settings = RowSettings.of(DecodeConfig(strategy="sample"), count)
    after = p[1:][jnp.zeros((count, 1), int)]
    p_rows = jnp.concatenate([jnp.broadcast_to(p[:1], (count, 1, 6)), after], axis=1)
    judge = jax.jit(speculative.judge)
    accepted, following = judge(
        p_rows, jnp.broadcast_to(q, (count, 1, 6)), tokens, jnp.ones(count, int), settings, keys[1]
    )
    first = np.where(accepted == 1, tokens[:, 0], following)
    expected = np.float64(p[0])
    observed = np.bincount(first, minlength=6)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((observed - count * expected)[possible] ** 2 / (count * expected)[possible]).sum()
    assert statistic < stats.chi2.ppf(0.999, possible.sum() - 1)
    rate = np.minimum(np.float64(p[0]), np.float64(q[0])).sum()
    assert abs(accepted.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / count)


def test_where_rounding_alone_refuses_the_model_chooses():
    p = jnp.full((1, 2, 4), 0.25)
    settings = RowSettings.of(DecodeConfig(strategy="sample"), 1)
    q = jnp.full((1, 1, 4), 0.25).at[0, 0, 2].set(1e9)
    accepted, following = speculative.judge(
        p, q, jnp.array([[2]]), jnp.array([1]), settings, jax.random.split(jax.random.key(0), 1)
    )
    assert accepted[0] == 0 and 0 <= following[0] < 4


@pytest.mark.slow
def test_samples_depend_on_the_key_of_the_row_alone():
    model, params, rows, decode, _ = case("rotary, windows")
    its, cfg = noisy(params, 0.3), DecodeConfig(strategy="sample", temperature=2.0, draft_tokens=3)
    tokens, keys = padded(rows, left=True), jax.random.split(jax.random.key(1), len(rows))

    def sample(places):
        found = decode(model, params, model, its, tokens[places], keys[places], length=LENGTH, cfg=cfg)
        return np.concatenate([np.asarray(leaf).reshape(len(places), -1) for leaf in found], axis=1)

    together = sample(np.arange(4))
    assert len(np.unique(together, axis=0)) == 4
    np.testing.assert_allclose(sample(np.arange(4)[::-1])[::-1], together, rtol=1e-5)
    for place in (0, 3):
        np.testing.assert_allclose(sample(np.array([place, 2]))[0], together[place], rtol=1e-5)
    other = decode(model, params, model, its, tokens, keys[::-1], length=LENGTH, cfg=cfg)
    assert (other.tokens != together[:, :LENGTH]).any()


@pytest.mark.parametrize(
    ("family", "changes", "decode", "sentence"),
    [
        ("decoder_lm", {"vocab_size": 12}, {}, "the draft knows 12 tokens, and the model 11: take a draft with the"),
        ("seq2seq", {"source_vocab_size": 9}, {}, "the draft knows 9 tokens of sources, and the model 11"),
        ("decoder_lm", {"max_length": 15}, {}, "the draft reads at most 15 tokens, and the model 16: take a draft of"),
        ("decoder_lm", {}, {"strategy": "beam"}, "decode.strategy='beam': does not go together with a draft"),
    ],
)
def test_drafts_that_do_not_fit(family, changes, decode, sentence):
    (model, params), (draft, its) = build(tiny(family)), build(tiny(family, **changes))
    of = speculative.translate if family == "seq2seq" else speculative.continue_text
    with pytest.raises(ConfigError, match=sentence):
        run(of, model, params, draft, its, np.array([[5, 6]]), **decode)
