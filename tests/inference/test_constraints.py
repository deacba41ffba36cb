"""Constraints on the next token, worked out by hand; tests/parity/test_decoding_rules.py compares with Hugging Face."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf

from tests.helpers import normal
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig, DecodeConfig
from tformer_jax.data.tokenizers.huggingface import HFTokenizer
from tformer_jax.data.tokenizers.simple import CharacterTokenizer, WordTokenizer
from tformer_jax.data.tokenizers.standalone import character_tokenizer
from tformer_jax.data.tokenizers.training import train_tokenizers
from tformer_jax.inference import sampling
from tformer_jax.inference.constraints import (
    Constraints,
    constrain,
    exclude_repeated,
    exclude_sequences,
    forbid,
    penalize,
)
from tformer_jax.inference.detokenization import output_decoder
from tformer_jax.inference.forced import first_tokens
from tformer_jax.inference.sampling import RowSettings
from tformer_jax.special_tokens import EOS, UNK

V = 10
LOGITS = normal(3, V, seed=1)


def constrained(
    constraints: Constraints, histories: list[list[int]], made: list[int] | None = None, **cfg
) -> np.ndarray:
    """Applies `constrain` to LOGITS; tokens after a history are arbitrary."""
    counts = np.array(list(map(len, histories)))
    history = np.full((3, counts.max() + 2), 7, np.int32)
    for row, ids in enumerate(histories):
        history[row, : len(ids)] = ids
    run = jax.jit(constrain, static_argnames="constraints")
    settings = RowSettings.from_config(DecodeConfig(**cfg), 3)
    return np.asarray(run(LOGITS, history, counts, np.array(made or counts), settings, constraints=constraints))


def excluded(*arguments, **options) -> list[list[int]]:
    """Returns the tokens that `constrain` excludes, and asserts that the others are unchanged."""
    actual = constrained(*arguments, **options)
    gone = actual == -np.inf
    np.testing.assert_array_equal(actual[~gone], LOGITS[~gone])
    return [np.flatnonzero(row).tolist() for row in gone]


def check(cfg: DecodeConfig, tokenizer) -> None:
    Constraints.from_config(cfg, tokenizer)
    first_tokens(cfg, tokenizer, continues=False)


def test_without_constraints_nothing_changes():
    assert not Constraints().need_history
    settings = RowSettings.from_config(DecodeConfig(), 3)
    nothing = jnp.zeros((3, 0), jnp.int32)
    actual = constrain(LOGITS, nothing, jnp.zeros(3, int), jnp.zeros(3, int), settings, Constraints())
    np.testing.assert_array_equal(actual, LOGITS)


def test_repetition_is_penalized_by_the_strength_of_the_row():
    logits = jnp.tile(jnp.array([[2.0, -2.0, 0.0, 1.0, -jnp.inf]]), (3, 1))
    history = jnp.array([[0, 1, 1, 4], [0, 0, 1, 2], [3, 1, 0, 2]])
    strength = jnp.array([2.0, 1.0, 0.5])
    actual = jax.jit(penalize)(logits, history, jnp.array([4, 3, 1]), strength)
    same = [2.0, -2.0, 0.0, 1.0, -np.inf]
    np.testing.assert_array_equal(actual, [[1.0, -4.0, 0.0, 1.0, -np.inf], same, [2.0, -2.0, 0.0, 2.0, -np.inf]])


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [[4, 5, 6], [], [4]]),
        (2, [[5, 6], [], [4]]),  # 4 was followed by 5 and 6
        (3, [[6], [], [4]]),  # 5 4 was followed by 6
        (5, [[], [], []]),
    ],
)
def test_no_ngram_occurs_again(n, expected):
    histories = [[4, 5, 4, 6, 5, 4], [], [4, 4, 4, 4]]
    assert excluded(Constraints(no_repeat_ngram=n), histories) == expected


def test_n_grams_longer_than_the_history():
    full, single = jnp.array([[4, 4]]), jnp.array([1])
    for n, expected in ((1, {4}), (2, {4}), (3, set())):
        actual = jax.jit(exclude_repeated, static_argnums=3)(LOGITS[:1], full, 2 * single, n)
        assert set(np.flatnonzero(actual[0] == -jnp.inf)) == expected
    exclude = jax.jit(exclude_sequences, static_argnums=3)
    actual = exclude(LOGITS[:1], full[:, :1], single, ((8, 4, 4, 6), (4, 5)))
    assert np.flatnonzero(actual[0] == -jnp.inf) == [5]


def test_forbidden_sequences_are_not_completed():
    constraints = Constraints(forbidden=((4, 4, 4, 4, 4, 6), (9,), (4, 5), (4, 6), (8, 4, 7)))
    assert constraints.need_history
    assert Constraints(forbidden=((9,), (4, 5))).need_history
    assert excluded(constraints, [[8, 4], [4, 8], []]) == [[5, 6, 7, 9], [9], [9]]
    single = Constraints(forbidden=((9,), (5,)))
    assert not single.need_history
    assert excluded(single, [[8, 4], [4, 8], []]) == [[5, 9]] * 3


def test_min_new_tokens_excludes_eos():
    assert excluded(Constraints(), [[4], [4] * 5, [4] * 9], [0, 1, 2], min_new_tokens=2) == [[EOS], [EOS], []]


def test_an_output_that_cannot_continue_ends_with_the_probability_of_the_model():
    everything = Constraints(forbidden=tuple((token,) for token in range(V)))
    assert excluded(everything, [[4], [], [4, 5]]) == [[token for token in range(V) if token != EOS]] * 3


def test_a_row_without_allowed_tokens_ends():
    everything = tuple((token,) for token in range(3, V))
    actual = constrained(Constraints(forbidden=everything), [[], [4], [5]], min_new_tokens=5)
    settings = RowSettings.from_config(DecodeConfig(), 3)
    keys = jax.random.split(jax.random.key(0), 3)
    assert jax.jit(sampling.choose)(forbid(actual, Constraints()), settings, keys).tolist() == [EOS] * 3


@pytest.mark.parametrize(("size", "eos", "expected"), [(7, (2,), [7, 8, 9]), (7, (8,), [7, 9]), (10, (2,), [])])
def test_rows_that_pad_the_vocabulary_are_never_generated(size, eos, expected):
    """Except an end that the tokenizer has no name for."""
    actual = forbid(LOGITS, Constraints(vocab_size=size, eos=eos, suppressed=(0,)))
    assert np.flatnonzero(np.isneginf(actual[0])).tolist() == [0, *expected]
    np.testing.assert_array_equal(actual[:, 1:7], LOGITS[:, 1:7])


@pytest.mark.long
def test_rows_have_separate_histories():
    constraints = Constraints(repetition=True, no_repeat_ngram=2, forbidden=((4, 5),))
    histories = [[6, 4, 5, 4], [4], [6, 5, 5]]
    together = constrained(constraints, histories, repetition_penalty=1.5, min_new_tokens=4)
    for row in range(3):
        others = [[6, 9, 8] if other != row else histories[row] for other in range(3)]
        alone = constrained(constraints, others, repetition_penalty=1.5, min_new_tokens=4)
        np.testing.assert_array_equal(alone[row], together[row])


class TestConstraintsOfAConfig:
    letters = CharacterTokenizer(" abc")
    words = WordTokenizer(["a", "b", "the"])

    def test_disabled_constraints_add_no_operations(self):
        actual = Constraints.from_config(DecodeConfig(), self.letters)
        assert actual == Constraints(vocab_size=8)
        assert hash(actual) == hash(Constraints.from_config(DecodeConfig(top_p=0.5, min_new_tokens=3), self.letters))
        programs = [
            str(jax.make_jaxpr(lambda logits, rules=rules: forbid(logits, rules))(jnp.zeros(8)))
            for rules in (actual, Constraints())
        ]
        assert programs[0] == programs[1]

    def test_settings(self):
        cfg = DecodeConfig(repetition_penalty=1.1, no_repeat_ngram=3, forbidden=("ab", "c"), prefix="ba")
        expected = Constraints(True, 3, forbidden=((5, 6), (7,)), vocab_size=8)
        actual = Constraints.from_config(cfg, self.letters)
        assert actual == expected  # " ab" ends in "ab", which is forbidden already
        assert first_tokens(cfg, self.letters, continues=False) == ((6, 5), 2)
        assert actual.need_history
        assert Constraints.from_config(DecodeConfig(repetition_penalty=1.1), self.letters).need_history
        assert Constraints.from_config(DecodeConfig(no_repeat_ngram=1), self.letters).need_history

    def test_a_text_is_forbidden_after_a_space_too(self):
        texts = [{"text": "cat a cat b cat c"}] * 9
        bpe = train_tokenizers(DataConfig(tokenizer="bpe", vocab_size=264), texts).target
        alone, inside = bpe.encode("cat"), bpe.encode(" cat")
        assert len(alone) == len(inside) == 1
        assert Constraints.from_config(DecodeConfig(forbidden=("cat",)), bpe).forbidden == (tuple(alone), tuple(inside))

    def test_a_text_is_forbidden_within_a_translation(self):
        """Tokenizers of translators drop spaces at the beginning of texts."""
        texts = [{"source": "a", "target": "cat a cat b cat c"}] * 9
        bpe = train_tokenizers(DataConfig(tokenizer="bpe", vocab_size=264), texts).target
        alone, inside = bpe.encode("cat"), bpe.encode("a cat")[1:]
        assert bpe.encode(" cat") == alone != inside
        assert Constraints.from_config(DecodeConfig(forbidden=("cat",)), bpe).forbidden == (tuple(alone), tuple(inside))

    def test_texts_with_some_unknown_tokens_are_forbidden(self):
        assert Constraints.from_config(DecodeConfig(forbidden=("aΩ",)), self.letters).forbidden == ((5, UNK),)

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"forbidden": ("a", "Ω")}, r"decode.forbidden=\('a', 'Ω'\): 'Ω' cannot be encoded with this vocabulary"),
            ({"forbidden": (" ",)}, "decode.forbidden=.*: ' ' cannot be encoded with this vocabulary"),
            ({"prefix": "a Ω"}, "decode.prefix='a Ω': cannot be encoded with this vocabulary"),
            ({"prefix": "  "}, "decode.prefix='  ': cannot be encoded with this vocabulary"),
            (
                {"prefix": "a b a", "max_new_tokens": 2},
                "prefix='a b a': has 3 tokens, more than decode.max_new_tokens=2",
            ),
        ],
    )
    def test_mistakes(self, settings, sentence):
        with pytest.raises(UserError, match=sentence) as caught:
            check(DecodeConfig(**settings), self.words)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("setting", "value"), [("prefix", "zebra"), ("forbidden", ("zebra",))])
def test_the_unknown_token_of_a_tokenizer_file_is_known(setting, value):
    """Its ids are shifted by four; `zebra` is only its unknown token."""
    pieces = ["[PAD]", "[UNK]", "[MASK]", "a", "the"]
    model = hf.models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    tokenizer = hf.Tokenizer(model)
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    loaded = HFTokenizer(tokenizer)
    assert (loaded.encode("zebra the"), loaded.special.unknown) == ([5, 8], 5)
    assert dict(loaded.special.names) | {4: "[PAD]", 5: "[UNK]", 6: "[MASK]"} == dict(loaded.special.names)
    assert loaded.extended(("<mask>",)).id_of("<mask>") == 6
    with pytest.raises(UserError, match="zebra"):
        check(DecodeConfig(**{setting: value}), loaded)


@pytest.mark.parametrize("setting", ["forbidden", "prefix"])
def test_texts_of_which_a_tokenizer_drops_characters_are_rejected(setting):
    """Tokenizers of nanoGPT's character models have no unknown token."""
    tokenizer = character_tokenizer("the cat sat on a mat")
    with pytest.raises(UserError, match=rf"decode.{setting}=.*cannot be encoded with this vocabulary"):
        check(DecodeConfig(**{setting: ("thé",) if setting == "forbidden" else "thé"}), tokenizer)
    check(DecodeConfig(**{setting: ("the",) if setting == "forbidden" else "the"}), tokenizer)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stop": ("OO",)}, "decode.stop=.*'OO' does not occur in normalized outputs; write 'oo' or leave it out"),
        ({"prefix": "The", "stop": ("the",)}, "decode.stop=.*'the' occurs in the normalized decode.prefix, 'the'"),
        ({"prefix": "The", "forbidden": ("HE",)}, "decode.forbidden=.*'he' occurs in the normalized decode.prefix"),
    ],
)
def test_texts_are_checked_as_a_tokenizer_normalizes_them(settings, sentence):
    """Regression test: such a stop text ended each output at once, or never."""
    tokenizer = character_tokenizer("the cat sat on a mat").normalized(("lowercase",), "en")
    for each in (tokenizer, tokenizer.extended(("<mask>",))):
        with pytest.raises(UserError, match=sentence):
            check(DecodeConfig(**settings), each)
        check(DecodeConfig(prefix="The", stop=("cat",), forbidden=("ON",)), each)
    clean = tokenizer.normalized(("whitespace",), "en")
    check(DecodeConfig(stop=(" ", "the ", " cat")), clean)
    with pytest.raises(UserError, match="decode.stop=.*does not occur in normalized outputs; leave it out"):
        check(DecodeConfig(stop=("\n",)), clean)


@pytest.mark.parametrize(("prefix", "decoded"), [("ld", "ld"), (" ld", " ld"), ("lo ld", "lo ld")])
def test_a_continuation_starts_with_the_prefix(prefix, decoded):
    """Regression test: tokenizers that put a space before texts put one before the prefix."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "\u2581", *"held ow.", "ld", "\u2581ld"])}
    merges = [("l", "d"), ("\u2581", "ld")]
    library = hf.Tokenizer(hf.models.BPE(vocabulary, merges, unk_token="<unk>"))
    library.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = hf.decoders.Metaspace(prepend_scheme="always")
    tokenizer = HFTokenizer(library)
    forced = first_tokens(DecodeConfig(prefix=prefix), tokenizer, continues=True).ids
    assert output_decoder(tokenizer, continues=True).decode(forced) == decoded
    text = first_tokens(DecodeConfig(prefix=prefix), tokenizer, continues=False).ids
    assert tokenizer.decode(text) == prefix.strip()


def test_a_prefix_that_every_continuation_separates_is_refused():
    words = WordTokenizer(["hello", "world"])
    with pytest.raises(UserError, match="decode.prefix='world': .* can only start with ' world'; write that"):
        first_tokens(DecodeConfig(prefix="world"), words, continues=True)
    forced = first_tokens(DecodeConfig(prefix=" world"), words, continues=True).ids
    assert forced == tuple(words.encode("world"))
