"""The server around the real engine: responses equal the output of the commands."""

import concurrent.futures
import dataclasses

import numpy as np
import pytest

from tests import oracles
from tests.helpers import assert_close, build, rest_slow, tiny
from tests.serving.live import around, until
from tformer_jax.config import Config, DataConfig, DecodeConfig, EmbedConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.requests import Request as TextRequest
from tformer_jax.inference.scores import Scorer
from tformer_jax.inference.text import TextGenerator, Translator
from tformer_jax.serving.model import ServedModel
from tformer_jax.special_tokens import EOS, PAD, SPECIAL_TOKENS

LETTERS = CharacterTokenizer("abcdefg")  # eleven tokens with the special ones
TOKENIZERS = Tokenizers(LETTERS, LETTERS)
TEXTS = ["abc", "g", "fedcba", "aa", "abcdefgabc", "ba"]


KINDS = {
    "latents, states, experts": {
        "decoder_layers": 2,
        "layer_pattern": ("gated_delta", "full"),
        "attention": "mla",
        "mla": {"latent_dim": 6},
        "ffn": "moe",
        "moe": {"every": 2, "num_experts": 3, "shared_dim": 5},
    },
    "latents": {"attention": "mla", "position": "rotary", "mla": {"latent_dim": 6, "rotary_dim": 2}},
    "states": {"attention": "gated_delta"},
    "sinks, windows": {
        "decoder_layers": 2,
        "attention_sinks": True,
        "num_kv_heads": 2,
        "layer_pattern": ("window", "nope"),
        "window": 3,
        "position": "rotary",
        "head_dim": 4,
    },
}
"""Language models whose layers store, attend or route in other ways than those of GPT-2."""


def parts(family: str, *, warm: bool = False, **settings):
    data = {"seq2seq": DataConfig(bucket_lengths=(8, 16))}.get(
        family, DataConfig(source="stdlib_text", batching="windows", window=8)
    )
    rows = EvalConfig(batch_size=3)  # those of the engine, so that server and commands share compiled functions
    cfg = Config(model=tiny(family, **settings), data=data, decode=DecodeConfig(max_new_tokens=6), eval=rows)
    model, params = build(cfg.model, seed=3)
    engine = Engine(cfg, model, params, TOKENIZERS, max_rows=3, few_shapes=warm)
    if warm:
        engine.warm_up(cfg.decode)
    return cfg, model, params, around(engine, ServedModel.build(cfg, model, params, TOKENIZERS), queue=16)


@pytest.fixture(scope="module")
def lm():
    *rest, server = parts("decoder_lm")
    with server as service:
        yield *rest, service


@pytest.fixture(scope="module")
def translator():
    *rest, server = parts("seq2seq")
    with server as service:
        yield *rest, service


def sampled(lm, texts, *, seed: int = 0, outputs: int = 1, **settings) -> list[str]:
    cfg, model, params, _ = lm
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, **settings))
    actual = TextGenerator(cfg, model, TOKENIZERS).stream(params, texts, seed=seed, outputs=outputs)
    return [output.text for row in actual for output in row]


@pytest.mark.slow
def test_completions_of_many_clients(lm):
    server = lm[-1]
    expected = sampled(lm, TEXTS)
    assert len(set(expected)) > 2
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        actual = list(pool.map(lambda text: server.post("/v1/completions", prompt=text).json(), TEXTS * 2))
    assert [each["choices"][0]["text"] for each in actual] == expected * 2
    lengths = [each["usage"]["completion_tokens"] for each in actual]
    ends = [each["choices"][0]["finish_reason"] for each in actual]
    assert all(end == ("length" if length == 6 else "stop") for length, end in zip(lengths, ends, strict=True))


@pytest.mark.parametrize("settings", rest_slow(KINDS, 0))
def test_other_kinds_of_attention(settings):
    """Prompts share beginnings; half of the clients read streams."""
    *rest, server = parts("decoder_lm", warm=True, **settings)
    texts = ["abcdefga", "abcdefgb", *TEXTS]
    expected = sampled((*rest, None), texts)
    assert len(set(expected)) > 2
    with server as service, concurrent.futures.ThreadPoolExecutor(6) as pool:
        whole = pool.map(lambda text: service.post("/v1/completions", prompt=text).json(), texts)
        chunks = pool.map(lambda text: service.stream("/v1/completions", prompt=text), texts)
        assert [actual["choices"][0]["text"] for actual in whole] == expected
        assert ["".join(chunk["choices"][0]["text"] for chunk in stream) for stream in chunks] == expected


@pytest.mark.long
def test_samples_are_those_of_the_command_with_the_same_seed(lm):
    server = lm[-1]
    settings = {"temperature": 2.0, "top_k": 5, "min_p": 0.01}
    expected = sampled(lm, TEXTS, seed=4, outputs=2, strategy="sample", **settings)
    assert len(set(expected)) > 6
    asked = {"prompt": TEXTS, "seed": 4, "n": 2, **settings}
    actual = server.post("/v1/completions", **asked).json()["choices"]
    assert [choice["text"] for choice in actual] == expected
    parts = [choice for chunk in server.stream("/v1/completions", **asked) for choice in chunk["choices"]]
    whole = ["".join(part["text"] for part in parts if part["index"] == place) for place in range(len(expected))]
    assert whole == expected


@pytest.mark.long
def test_translations_and_their_scores(translator):
    cfg, model, params, server = translator
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, strategy="beam", beams=3))
    expected = list(Translator(cfg, model, TOKENIZERS).stream(params, TEXTS, outputs=2))
    actual = server.post("/translate", text=TEXTS, beams=3, n_best=2).json()["translations"]
    assert [[each["text"] for each in row] for row in actual] == [[each.text for each in row] for row in expected]
    scores = [each.score for row in expected for each in row]
    assert [each["score"] for row in actual for each in row] == pytest.approx(scores, abs=1e-5)


@pytest.mark.slow
def test_one_request_has_many_languages_and_prefixes():
    """The model is told both languages; clients see the names of all."""
    letters = LETTERS.extended(["<2de>", "<2en>", "<2pt_BR>"])
    both = Tokenizers(letters, letters)
    files = {"train": ("{src}-{tgt}",), "validation": ("{src}-{tgt}",), "bucket_lengths": (8, 16)}
    data = DataConfig(
        source="tsv", **files, directions=("en-de", "en-pt_BR", "de-en"), target_tags=("source", "target")
    )
    sizes = {"vocab_size": letters.vocab_size, "source_vocab_size": letters.vocab_size}
    rows = EvalConfig(batch_size=3)
    cfg = Config(model=tiny("seq2seq", **sizes), data=data, decode=DecodeConfig(max_new_tokens=6), eval=rows)
    model, params = build(cfg.model, seed=3)
    asked = [TextRequest("abc", "de", "en"), TextRequest("abc", "pt-BR", "en"), TextRequest("ga", "de", "en", "fb")]
    translate = Translator(cfg, model, both)
    expected = [output for (output,) in translate.stream(params, asked, scores=True)]
    engine = Engine(cfg, model, params, both, max_rows=3)
    with around(engine, ServedModel.build(cfg, model, params, both)) as server:
        body = {"text": ["abc", "abc", "ga"], "source_language": "English", "target_language": ["de", "pt-BR", "de"]}
        body["prefix"] = [None, None, "fb"]
        actual = server.post("/translate", **body, logprobs=1).json()["translations"]
        for (output,) in actual:
            assert "".join(output["logprobs"]["tokens"]).removesuffix("</s>") == output["text"]
        assert [output["text"] for (output,) in actual] == [output.text for output in expected]
        scores = [output.score for output in expected]
        assert [output["score"] for (output,) in actual] == pytest.approx(scores, abs=1e-5)
        assert sum(actual[1][0]["logprobs"]["token_logprobs"]) == pytest.approx(scores[1], abs=1e-5)
        (blank,) = server.post("/translate", **(body | {"text": [" ", "a", "b"]}), logprobs=1).json()["translations"][0]
        assert (blank["text"], blank["logprobs"]["tokens"]) == ("", [])
        pieces = server.stream("/translate", text="ga", source_language="en", target_language="de", prefix="fb")
        assert "".join(piece["text"] for piece in pieces) == expected[2].text
        completed = server.post("/v1/completions", prompt="ga", source_language="en", target_language="de", prefix="fb")
        assert completed.json()["choices"][0]["text"] == expected[2].text
        for changes, sentence in (
            (
                {"target_language": None, "source_language": None},
                "text 1: the target language is missing: name one of de, pt_BR, en",
            ),
            ({"target_language": 5}, "must be a text or a list, not an integer"),
            ({"target_language": ["de"]}, "must be a text, or a list with a text or null for each of the 3 texts"),
            ({"target_language": ["de"] * 2}, "must be a text, or a list with a text or null for each of the 3 texts"),
            ({"source_language": "Klingon"}, "text 1: the model has no language 'Klingon'; it has de, en, pt_BR"),
            ({"prefix": "Ω"}, "text 1: decode.prefix='Ω': cannot be encoded with this vocabulary; choose other words"),
        ):
            answer = server.post("/translate", **(body | changes))
            assert (answer.status_code, sentence in answer.json()["error"]["message"]) == (400, True), answer.text
        names = {"de": "German", "pt_BR": "Portuguese (Brazil)", "en": "English"}
        shown = {"target_language": names, "source_language": {code: names[code] for code in ("en", "de")}}
        assert server.client.get("/info").json()["language_names"] == shown
        assert server.client.get("/v1/models").json()["data"][0]["language_names"] == shown


@pytest.mark.slow
def test_tags_may_stand_last():
    """Sources and outputs of the server, and their log-probabilities, are those of the commands."""
    letters = LETTERS.extended(["<2de>", "<2en>"])
    letters.special = dataclasses.replace(letters.special, tags_last=True)
    files = {"train": ("{src}-{tgt}",), "validation": ("{src}-{tgt}",), "bucket_lengths": (8, 16)}
    told = {"source_tags": ("source",), "target_tags": ("target",)}
    data = DataConfig(source="tsv", **files, directions=("en-de", "de-en"), **told)
    sizes = {"vocab_size": letters.vocab_size, "source_vocab_size": letters.vocab_size}
    cfg = Config(model=tiny("seq2seq", **sizes), data=data, decode=DecodeConfig(max_new_tokens=6))
    model, params = build(cfg.model, seed=3)
    parts = cfg, model, params, Tokenizers(letters, letters)
    asked = [TextRequest("abc", "de", "en"), TextRequest("ga", "en", "de")]
    expected = [output for (output,) in Translator(cfg, model, parts[3]).stream(params, asked, scores=True)]
    with around(Engine(*parts, max_rows=3), ServedModel.build(*parts)) as server:
        body = {"text": ["abc", "ga"], "source_language": ["en", "de"], "target_language": ["de", "en"], "logprobs": 0}
        actual = server.post("/translate", **body).json()["translations"]
    for (output,), other in zip(actual, expected, strict=True):
        assert output["text"] == other.text == "".join(output["logprobs"]["tokens"]).removesuffix("</s>")
        assert output["score"] == pytest.approx(other.score, abs=1e-5)
        assert sum(output["logprobs"]["token_logprobs"]) == pytest.approx(other.score, abs=1e-5)


@pytest.mark.slow
def test_a_language_model_has_prefixes_but_no_languages(lm):
    server = lm[-1]
    (expected,) = sampled(lm, ["abc"], prefix="dd")
    assert server.post("/v1/completions", prompt="abc", prefix="dd").json()["choices"][0]["text"] == expected
    refused = server.post("/v1/completions", prompt="abc", target_language="de")
    sentence = "the model has no languages: leave target_language and source_language out"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, sentence)


def test_requests_that_the_engine_refuses(lm, translator):
    for server, route, body, sentence in (
        (lm[-1], "/v1/completions", {"prompt": "a" * 99}, "the prompt has 99 tokens"),
        (
            lm[-1],
            "/v1/completions",
            {"prompt": "a", "n": 4},
            "4 outputs are more than --max-rows 3",
        ),
    ):
        answer = server.post(route, **body)
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]


@pytest.mark.long
def test_an_empty_prompt_is_the_token_that_starts_texts(lm):
    asked = {"max_tokens": 3, "temperature": 0, "logprobs": 1}
    empty, ids = (lm[-1].post("/v1/completions", prompt=prompt, **asked).json() for prompt in ("", [EOS]))
    assert empty["choices"] == ids["choices"]
    assert empty["usage"]["prompt_tokens"] == 1


def test_numbers_at_their_limits(lm):
    extremes = {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1e-300, "min_p": 1, "max_tokens": 2**31 - 1}
    for name, value in extremes.items():
        for seed in (0, 2**31 - 1):
            answer = lm[-1].post("/v1/completions", **{"prompt": "ab", "seed": seed, name: value})
            assert answer.status_code == 200, answer.text
    assert lm[-1].post("/v1/completions", prompt="ab", temperature=1e-4).status_code == 200


@pytest.mark.slow
def test_all_pages_are_freed(lm, translator):
    for server, route, field in ((lm[-1], "/v1/completions", "prompt"), (translator[-1], "/translate", "text")):
        assert server.post(route, **{field: "abc"}).status_code == 200
        until(lambda server=server: server.metric("tformer_pages") > 0 == server.metric("tformer_pages_used"))


def test_caches_of_the_engine_are_bounded():
    cfg, model, params, _ = parts("decoder_lm")
    engine = Engine(cfg, model, params, TOKENIZERS, max_rows=1)
    for number in range(300):
        sampling = {"strategy": "sample", "temperature": 1 + number / 100}
        engine.submit(Request((5, 6), dataclasses.replace(cfg.decode, **sampling)))
    caches = engine._kind_without_prefix, engine._first_tokens
    assert [cache.cache_info().currsize for cache in caches] == [256, 256]


def log_p(cfg, params, ids) -> np.ndarray:
    """Returns the log-probabilities of all tokens at each position, [T, V], by a float64 pass."""
    read = np.array([ids])
    return np.log(oracles.softmax(oracles.decoder_lm(oracles.f64(params), cfg.model, read, read != PAD)[0]))


def as_lm_eval_reads(choice, context: int) -> tuple[float, bool]:
    """Returns what lm-evaluation-harness reads: the log-probability of a continuation, and whether it is greedy."""
    values = choice["logprobs"]["token_logprobs"][context:-1]
    best = choice["logprobs"]["top_logprobs"][context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, best, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("as_text", [False, True])
def test_what_lm_evaluation_harness_asks(lm, as_text):
    """The request of its model `local-completions`, for continuations of contexts, some of them greedy."""
    cfg, model, params, server = lm
    pairs = [(context, context + letter) for context in ("fedcba", "g") for letter in "abcdefg"]
    pairs.append(("abc", "abcgfg"))
    ids = [LETTERS.encode(text) for _, text in pairs]
    body = {"model": cfg.name, "prompt": [text for _, text in pairs] if as_text else ids}
    body |= {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = server.post("/v1/completions", **body).json()["choices"]
    scores = Scorer(cfg, model, TOKENIZERS).stream(params, [(text,) for _, text in pairs])
    greedy = []
    for (context, _), row, choice, scored in zip(pairs, ids, choices, scores, strict=True):
        total, is_greedy = as_lm_eval_reads(choice, len(context))
        expected = log_p(cfg, params, row)[len(context) - 1 : -1]
        labels = row[len(context) :]
        assert total == pytest.approx(expected[np.arange(len(labels)), labels].sum(), rel=1e-5)
        assert total == pytest.approx(sum(scored.log_probabilities[len(context) - 1 :]), rel=1e-6)
        assert is_greedy == (expected.argmax(axis=-1) == labels).all()
        greedy.append(is_greedy)
    assert len(set(greedy)) == 2


def test_the_most_probable_tokens(lm):
    cfg, _, params, server = lm
    body = {"prompt": "abc", "logprobs": 5, "echo": True, "max_tokens": 0}
    (choice,) = server.post("/v1/completions", **body).json()["choices"]
    ids = LETTERS.encode("abc")
    names = {name: i for i, name in enumerate([*SPECIAL_TOKENS, *"abcdefg"])}
    for values, label, top in zip(
        log_p(cfg, params, ids), ids[1:], choice["logprobs"]["top_logprobs"][1:], strict=False
    ):
        assert {names[name] for name in top} == {label, *np.argsort(-values)[:5].tolist()}
        for name, value in top.items():
            assert value == pytest.approx(values[names[name]], rel=1e-5)


@pytest.mark.long
def test_log_probabilities_of_outputs_sum_to_their_scores(translator):
    """Scores are summed by the cached steps of decoding."""
    server = translator[-1]
    actual = server.post("/translate", text=TEXTS).json()["translations"]
    choices = server.post("/v1/completions", prompt=TEXTS, logprobs=0).json()["choices"]
    for (output,), choice in zip(actual, choices, strict=True):
        assert choice["text"] == output["text"]
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(output["score"], rel=1e-4)


def test_embeddings_as_the_settings_of_the_run_say():
    """With a prompt before each text, and a maximum length."""
    plain = Config(model=tiny("classifier"), data=DataConfig(source="cldr_language", bucket_lengths=(8, 16)))
    how = {"pooling": "last", "normalize": True}
    embed = EmbedConfig(**how, max_length=6, prompts=("q=ba", "p=a"), prompt="q")
    model, params = build(plain.model, seed=2)
    with around(None, ServedModel.build(dataclasses.replace(plain, embed=embed), model, params, TOKENIZERS)) as server:
        actual = server.post("/v1/embeddings", input=["abc", "b"]).json()["data"]
        refused = server.post("/v1/embeddings", input="abcab")
    with around(None, ServedModel.build(plain, model, params, TOKENIZERS, **how)) as server:
        expected = server.post("/v1/embeddings", input=["baabc", "bab"]).json()["data"]
    assert [each["embedding"] for each in actual] == [each["embedding"] for each in expected]
    assert refused.status_code == 400 and "has 7 tokens, but the model takes at most 6" in refused.text


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", False), ("first", True)])
def test_embeddings_and_labels_equal_the_oracle(pooling, normalize):
    """Embeddings are pooled as the server's flags say, whatever the classifier pools."""
    data = DataConfig(source="cldr_language", bucket_lengths=(8, 16))
    cfg = Config(model=tiny("classifier", pooling="first"), data=data)
    model, params = build(cfg.model, seed=2)
    labels, flags = ("en", "de", "fr"), {"pooling": pooling, "normalize": normalize}
    with around(None, ServedModel.build(cfg, model, params, TOKENIZERS, labels=labels, **flags)) as server:
        actual = server.post("/v1/embeddings", input=TEXTS).json()["data"]
        classes = server.post("/classify", input=TEXTS).json()["data"]
    for text, each in zip(TEXTS, classes, strict=True):
        tokens = np.array([LETTERS.encode(text)])
        (logits,) = oracles.classifier(oracles.f64(params), cfg.model, tokens, tokens != PAD)
        assert_close(each["probs"], oracles.softmax(logits))
        assert each["label"] == labels[logits.argmax()]
    for text, each in zip(TEXTS, actual, strict=True):
        tokens, p = np.array([LETTERS.encode(text)]), oracles.f64(params)
        x = oracles.embed(tokens, p["embedding"], p.get("input"), cfg.model)
        mask = oracles.padding_mask(tokens != PAD)
        x = oracles.stack(x, p["encoder"], cfg.model, cfg.model.encoder_layers, mask, bidirectional=True)
        expected = x[0].mean(axis=0) if pooling == "mean" else x[0, 0]
        assert_close(each["embedding"], expected / np.linalg.norm(expected) if normalize else expected)
