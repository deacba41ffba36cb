"""Models in CTranslate2's format, by its own converter or the command that exports, have outputs equal to ours."""

import pytest
import transformers

import tformer_jax as tj
from tests.helpers import rest_slow
from tests.parity import checkpoints, multilingual, own_runs
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_checks, export_hf, import_hf
from tformer_jax.runs import weights
from tformer_jax.special_tokens import EOS

ctranslate2 = pytest.importorskip("ctranslate2")
TEXTS = ["the cat", "a dog and the", "der Hund und die Katze"]
NEW = 6


@pytest.fixture(scope="module")
def converted(imported, tmp_path_factory):
    """Returns a function that exports and converts the run of a kind, once."""
    made = {}

    def make(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            run = imported(kind)[1]
            export_hf.main(["--run", str(run), str(folder / "exported")])
            converter = ctranslate2.converters.TransformersConverter(str(folder / "exported"))
            converter.convert(str(folder / "converted"))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
            made[kind] = tj.load(run), tokenizer, str(folder / "converted")
        return made[kind]

    return make


CASES = [("marian", 3), ("gpt2", 1), ("marian", 1), ("t5", 3), ("t5", 1), ("llama", 1), ("llama", 3), ("gpt2", 3)]


@pytest.mark.parametrize("case", rest_slow(CASES, 2))
def test_outputs_are_equal(converted, case):
    kind, beams = case
    run, tokenizer, folder = converted(kind)
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    padding = run.config.model.vocab_size - len(tokenizer)  # rows that the converters name so, and we never generate
    never = {"suppress_sequences": [[f"<extra_id_{i}>"] for i in range(padding)]}
    settings = {"beams": beams, "max_new_tokens": NEW} if beams > 1 else {"strategy": "greedy", "max_new_tokens": NEW}
    if run.config.model.family == "seq2seq":
        actual = ctranslate2.Translator(folder).translate_batch(
            inputs, beam_size=beams, max_decoding_length=NEW, **never
        )
        rows, ours = [result.hypotheses[0] for result in actual], run.translate(TEXTS, unknown="omit", **settings)
        expected = [decoded(tokenizer, row) for row in rows]
    else:
        ends = [tokenizer.convert_ids_to_tokens(i) for i in run.tokenizers.target.special.eos]
        search = {"beam_size": beams, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": ends}
        actual = ctranslate2.Generator(folder).generate_batch(inputs, max_length=NEW, **search, **never)
        whole = [decoded(tokenizer, row + result.sequences[0]) for row, result in zip(inputs, actual, strict=True)]
        expected, ours = (
            whole,
            [text + more for text, more in zip(TEXTS, run.generate(TEXTS, unknown="omit", **settings), strict=True)],
        )
    assert ours == expected
    assert len(set(ours)) > 1 or kind == "t5"


OWN = [("marian", "bpe", 4), ("llama", "bpe", 4), ("marian", "bpe", 1), ("gpt2", "bytes", 3)]
OWN += [(name, "bpe", beams) for name in ("bart", "t5", "gpt2", "llama", "qwen2", "qwen3") for beams in (1, 3)]
OWN += [(name, "bpe", 3) for name in ("mistral", "gemma2", "gemma3_text")]


@pytest.mark.parametrize("case", rest_slow(list(dict.fromkeys(OWN)), 2))
def test_outputs_of_own_runs_are_equal(case, tmp_path):
    """With the settings of scripts/README.md; where a bias makes ends frequent, it matters when a search stops."""
    name, kind, beams = case
    run, out, alpha = tmp_path / "run", tmp_path / "out", 0.6
    caps = {"attention_softcap": None, "output_softcap": None} if name == "gemma2" else {}
    own_runs.make(run, name, kind, **caps, **(NO_WINDOWS if name in ("mistral", "gemma2", "gemma3_text") else {}))
    loaded = tj.load(run)
    frequent_ends(loaded)
    weights.save(run, loaded.params, "last", [], 0)
    export(run, out, "--model-type", name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    search = {"beam_size": beams, "length_penalty": alpha, "suppress_sequences": [["<pad>"], ["<s>"]]}
    settings = (
        {"beams": beams, "length_alpha": alpha, "early_stopping": "first"} if beams > 1 else {"strategy": "greedy"}
    )
    if loaded.config.model.family == "seq2seq":
        actual = ctranslate2.Translator(str(out)).translate_batch(inputs, max_decoding_length=NEW, **search)
        rows, ours = (
            [result.hypotheses[0] for result in actual],
            loaded.translate(TEXTS, max_new_tokens=NEW, unknown="omit", **settings),
        )
    else:
        options = {"max_length": NEW, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": ["</s>"]}
        actual = ctranslate2.Generator(str(out)).generate_batch(inputs, **options, **search)
        rows, ours = (
            [result.sequences[0] for result in actual],
            loaded.generate(TEXTS, max_new_tokens=NEW, unknown="omit", **settings),
        )
    assert ours == [decoded(tokenizer, row) for row in rows]


@pytest.mark.slow
def test_beams_that_begin_with_a_prefix_are_equal(tmp_path):
    """Without a length penalty, for which forced tokens count there and not here."""
    run, out = tmp_path / "run", tmp_path / "out"
    own_runs.make(run, "marian", "bpe")
    loaded = tj.load(run)
    frequent_ends(loaded)
    weights.save(run, loaded.params, "last", [], 0)
    export(run, out, "--model-type", "marian")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    search = {"beam_size": 3, "length_penalty": 0, "suppress_sequences": [["<pad>"], ["<s>"]]}
    settings = {"beams": 3, "length_alpha": 0.0, "early_stopping": "first", "max_new_tokens": NEW, "unknown": "omit"}
    for prefix in ("der", "a dog"):
        forced = tokenizer.convert_ids_to_tokens(tokenizer(text_target=prefix, add_special_tokens=False)["input_ids"])
        actual = ctranslate2.Translator(str(out)).translate_batch(
            inputs, target_prefix=[forced] * len(inputs), max_decoding_length=NEW, **search
        )
        ours = loaded.translate(TEXTS, prefix=prefix, **settings)
        assert ours == [decoded(tokenizer, result.hypotheses[0]) for result in actual]
        assert all(text.startswith(prefix) for text in ours)
        assert ours != loaded.translate(TEXTS, **settings)


def export(run, out, *flags):
    export_hf.main(["--run", str(run), str(out), "--format", "ctranslate2", *flags])


@pytest.mark.parametrize("kind", rest_slow(["BartForConditionalGeneration", "MarianMTModel"], 1))
def test_rows_without_tokens_are_converted(kind, tmp_path):
    """Regression test: CTranslate2 said that its vocabulary is smaller than the model's."""
    folder, run, out = (tmp_path / name for name in ("theirs", "run", "out"))
    folder.mkdir()
    if kind == "MarianMTModel":
        config = checkpoints.marian(folder).config.to_dict()
    else:
        ids = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
        config = checkpoints.MARIAN | checkpoints.bart_tokenizer(folder) | ids
    rows = dict.fromkeys(("vocab_size", "decoder_vocab_size"), config["vocab_size"] + 3)
    checkpoints.save(folder, kind, config | rows)
    import_hf.main([str(folder), "--run", str(run)])
    export(run, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    never = [[f"<extra_id_{i}>"] for i in range(3)] + [["<pad>"]]
    search = {"beam_size": 1, "max_decoding_length": NEW, "suppress_sequences": never}
    actual = ctranslate2.Translator(str(out)).translate_batch(inputs, **search)
    ours = tj.load(run).translate(TEXTS, strategy="greedy", max_new_tokens=NEW, unknown="omit")
    assert ours == [decoded(tokenizer, result.hypotheses[0]) for result in actual] and any(ours)


def test_an_mbart_without_languages_has_equal_outputs(tmp_path):
    """Regression test: CTranslate2 left its start to callers, as if it were the tag of a language."""
    folder, run, out = (tmp_path / name for name in ("theirs", "run", "out"))
    folder.mkdir()
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 32}
    sizes |= {f"{stack}_{name}": 4 for stack in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    vocabulary = checkpoints.bart_tokenizer(folder)
    checkpoints.save(folder, "MBartForConditionalGeneration", sizes | vocabulary | {"decoder_start_token_id": 2})
    import_hf.main([str(folder), "--run", str(run)])
    export(run, out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    actual = ctranslate2.Translator(str(out)).translate_batch(inputs, beam_size=1, max_decoding_length=NEW)
    ours = tj.load(run).translate(TEXTS, strategy="greedy", max_new_tokens=NEW, unknown="omit")
    assert ours == [decoded(tokenizer, result.hypotheses[0]) for result in actual] and any(ours)


def test_an_mbart_50_starts_as_its_config_says(tmp_path, monkeypatch):
    """Regression test: CTranslate2 starts each one from its end token."""
    name, target = "facebook/mbart-large-50-many-to-many-mmt", "pt_XX"
    monkeypatch.setitem(multilingual.PUBLISHED, name, multilingual.PUBLISHED[name] | {"decoder_start_token_id": 0})
    multilingual.make(tmp_path / "theirs", name)
    import_hf.main([str(tmp_path / "theirs"), "--run", str(tmp_path / "run")])
    export(tmp_path / "run", tmp_path / "out")
    run, tokenizer = tj.load(tmp_path / "run"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer.src_lang = "de_DE"
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    options = {"target_prefix": [[target]] * len(TEXTS), "beam_size": 1, "max_decoding_length": NEW}
    actual = ctranslate2.Translator(str(tmp_path / "out")).translate_batch(inputs, **options)
    settings = {"strategy": "greedy", "max_new_tokens": NEW, "unknown": "omit"}
    ours = run.translate(TEXTS, to=target, source_language="de_DE", **settings)
    assert ours == [decoded(tokenizer, result.hypotheses[0]) for result in actual] and any(ours)


@pytest.mark.slow
def test_a_t5_with_its_own_head_has_equal_log_probabilities(tmp_path, capsys):
    run = own_runs.make(tmp_path / "run", "t5", tie_embeddings="inputs", scale_output=False)
    export(run, tmp_path / "out")
    assert ": log-probabilities within " in capsys.readouterr().out.splitlines()[-1]


def test_quantized_weights_are_smaller_and_only_described(tmp_path, capsys):
    run = own_runs.make(tmp_path / "run", "marian")
    for name in ("float32", "int8"):
        export(run, tmp_path / name, "--quantization", name)
    assert "with weights of int8: log-probabilities within " in capsys.readouterr().out.splitlines()[-1]
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("float32", "int8")]
    assert sizes[1] < 0.6 * sizes[0]


def test_what_cannot_be_converted_is_refused_and_not_written(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--quantization is for --format ctranslate2 or run: add it, or leave"):
        export_hf.main(["--run", str(tmp_path), str(tmp_path / "out"), "--quantization", "int8"])
    run = own_runs.make(tmp_path / "run", "arcee")
    with pytest.raises(UserError, match="CTranslate2 cannot convert this model .No conversion is registered"):
        export(run, tmp_path / "out")
    run = own_runs.make(tmp_path / "run", "gpt2")
    monkeypatch.setattr(export_checks, "SCORE_TOLERANCE", 0.0)
    with pytest.raises(UserError, match="log-probabilities of CTranslate2 .* differ from the run's by .*not written"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


NO_WINDOWS = {"window": None, "layer_pattern": ("full",)}


def frequent_ends(run: tj.Run) -> None:
    """Raises the logit of the end token of a model with an output bias."""
    if run.config.model.output_bias:
        run.params["head"]["bias"] = run.params["head"]["bias"].at[EOS].set(3.0)


def decoded(tokenizer, tokens: list[str]) -> str:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
