"""Multilingual encoder-decoders, imported and exported by the commands, with the languages of transformers' classes.

The weights are random. Of the configs in `published.json`, that of mt5-small was compared with copies in public
repositories, and those of NLLB and mbart-large-en-ro in part; the others are written from memory, and were not compared
with the published files.
"""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import checkpoints, family_table, multilingual
from tformer_jax.cli import evaluate, export_hf, import_hf, translate, vocabulary
from tformer_jax.cli.export_checks import logits
from tformer_jax.config import EvalConfig, OptimConfig, ParallelConfig, TrainConfig
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.runs import experiment, training

TEXTS = ["the cat sat on the mat", "a dog", "der Hund und die Katze"]
LANGUAGES = {
    "facebook/mbart-large-en-ro": ("en_XX", "ro_RO"),
    "facebook/nllb-200-distilled-600M": ("eng_Latn", "zho_Hant"),
    "facebook/m2m100_418M": ("en", "de"),
    "facebook/mbart-large-50-many-to-many-mmt": ("de_DE", "pt_XX"),
    "google/madlad400-3b-mt": (None, "de"),
    "google/mt5-small": (None, None),
    "google/umt5-small": (None, None),
}
NEW = 6


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns a function that makes the folder, the run and transformers' model of a name, once."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            run = folder.with_name(f"{folder.name}_run")
            model = multilingual.make(folder, name)
            import_hf.main([str(folder), "--run", str(run)])
            made[name] = folder, tj.load(run), model
        return made[name]

    return make


def source_ids(tokenizer, name: str, text: str) -> list[int]:
    source, target = LANGUAGES[name]
    if source is not None:
        tokenizer.src_lang = source
    return tokenizer(text if source or target is None else f"<2{target}> {text}")["input_ids"]


def their_outputs(tokenizer, model: torch.nn.Module, name: str, beams: int) -> list[str]:
    source, target = LANGUAGES[name]
    first = {} if source is None else {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(tag(name, target))}
    if "en-ro" in name:
        first = {"decoder_start_token_id": first["forced_bos_token_id"]}
    tokens = max(tokenizer.get_vocab().values()) + 1 if "m2m100" not in name else model.config.vocab_size - 8
    unused = {"suppress_tokens": list(range(tokens, model.config.vocab_size)) or None}
    actual = []
    for text in TEXTS:
        ids = torch.tensor([source_ids(tokenizer, name, text)])
        settings = {"num_beams": beams, "max_new_tokens": NEW, "do_sample": False} | first | unused
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0]
        actual.append(decode(tokenizer, output.tolist()))
    return actual


def decode(tokenizer, ids: list[int]) -> str:
    """Returns the text without tags, some of which are no special tokens to transformers."""
    ids = [i for i in ids if not tokenizer.convert_ids_to_tokens(i).startswith(("<2", "__"))]
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def tag(name: str, language: str) -> str:
    return f"__{language}__" if "m2m100" in name else language


def our_outputs(run: tj.Run, name: str, beams: int, **search) -> list[str]:
    source, target = LANGUAGES[name]
    settings = {"strategy": "greedy"} if beams == 1 else {"beams": beams} | search
    return run.translate(TEXTS, to=target, source_language=source, max_new_tokens=NEW, unknown="omit", **settings)


@pytest.mark.parametrize("name", rest_slow(LANGUAGES.keys(), 2))
def test_ids_of_sources_and_logits(imported, name):
    folder, run, model = imported(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source, target = LANGUAGES[name]
    for text in TEXTS:
        expected = source_ids(tokenizer, name, text)
        request = tj.Request(text, target, source)
        encoded = run._inputs(0, (request, "der Hund"))
        assert encoded["source"] == expected
        inputs = {"input_ids": [encoded["source"]], "decoder_input_ids": [encoded["target_in"]]}
        with torch.no_grad():
            theirs = model(**{key: torch.tensor(rows) for key, rows in inputs.items()}).logits.numpy()
        batch = {key: np.array([row], np.int32) for key, row in encoded.items()}
        kind = multilingual.PUBLISHED[name]["model_type"]
        proves = (f"whole model: {name}", type(model).__name__)
        family_table.record_logits(name, folder, kind, logits(run, batch), theirs, proves=proves)


@pytest.mark.parametrize("name", rest_slow(LANGUAGES.keys(), 1))
def test_outputs_of_the_import_and_of_the_export(imported, name, tmp_path):
    folder, run, model = imported(name)
    export_hf.main(["--run", str(run.path), str(tmp_path / "out")])
    back = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for key, array in model.state_dict().items():
        np.testing.assert_array_equal(back.state_dict()[key], array)
    for beams in (1, 3):
        actual = our_outputs(run, name, beams)
        for place, theirs in ((folder, model), (tmp_path / "out", back)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            assert actual == their_outputs(tokenizer, theirs, name, beams)
    assert len(set(actual)) > 1
    family_table.record(name, outputs="greedy, beams", export="arrays, outputs")


@pytest.mark.parametrize("kind", ["huggingface", "ctranslate2"])
@pytest.mark.parametrize("name", rest_slow([name for name, (_, target) in LANGUAGES.items() if target], 2))
def test_the_program_of_the_model_card_writes_what_the_run_writes(imported, name, kind, tmp_path, monkeypatch, capsys):
    """Regression test: sources had two tags, or outputs had no language.

    transformers writes the tags of MADLAD-400 as text, and CTranslate2 the rows of M2M-100 that are no tokens, which
    only random weights prefer.
    """
    pytest.importorskip("transformers" if kind == "huggingface" else "ctranslate2")
    _, run, _ = imported(name)
    export_hf.main(["--run", str(run.path), str(tmp_path / "out"), "--format", kind, "--no-check"])
    program = re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1]
    unused = [[f"madeupword{i}"] for i in range(8)] if "m2m100" in name else []
    program = program.replace("beam_size", f"suppress_sequences={unused}, beam_size")
    monkeypatch.chdir(tmp_path)
    told = {"source_language": run.languages.sources[0]} if LANGUAGES[name][0] else {}
    for text in TEXTS:
        capsys.readouterr()
        exec(compile(program.replace("TEXT", text), "README.md", "exec"), {})
        written = re.sub("<2[a-z]+>", "", capsys.readouterr().out.removesuffix("\n"))
        assert [written] == run.translate(
            [text], to=run.languages.targets[1], unknown="omit", strategy="greedy", **told
        )


def test_codes_of_marian_are_tags_if_there_are_several(tmp_path):
    """A source with a tag has the ids of a text that starts with its name."""
    checkpoints.marian(tmp_path)
    assert languages_of(load_checkpoint_tokenizers(tmp_path).target) == {}
    names = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(names | {">>de<<": len(names)}))
    source = load_checkpoint_tokenizers(tmp_path).source
    tags = languages_of(source)
    assert tags == {"fr": names[">>fr<<"], "de": len(names)}
    assert source.special.wrap_side(source.encode("a dog"), (tags["fr"],)) == [*source.encode(">>fr<< a dog"), 0]


def test_an_export_has_the_language_of_outputs(tmp_path, capsys):
    """Regression test: `generate` of the export chose a language, unless the run does not translate into that one."""
    model = multilingual.make(tmp_path / "theirs", "facebook/nllb-200-distilled-600M")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    fields = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("zho_Hans"), "max_length": 8}
    fields |= {"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(fields))
    import_hf.main([str(tmp_path / "theirs"), "--run", str(tmp_path / "run")])
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out"), "--no-check"])
    places, ids = (tmp_path / "theirs", tmp_path / "out"), tokenizer("the cat", return_tensors="pt")
    models = [type(model).from_pretrained(place, dtype=torch.float32).eval() for place in places]
    expected, actual = (each.generate(**ids)[0].tolist() for each in models)
    assert actual == expected and expected[1] == fields["forced_bos_token_id"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["data"] |= {"language_fields": [], "source_tags": ["target"], "target_tags": []}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "other"), "--no-check"])
    assert "not written: forced_bos_token_id of zho_Hans" in capsys.readouterr().err
    assert "forced_bos_token_id" not in json.loads((tmp_path / "other" / "generation_config.json").read_text())


@pytest.mark.parametrize("name", rest_slow([name for name, (source, _) in LANGUAGES.items() if source], 1))
def test_the_exported_tokenizer_has_the_language_of_sources(imported, name, tmp_path):
    """Regression test: without `src_lang`, it read texts as of the first language of its class."""
    folder, path = (
        shutil.copytree(imported(name)[0], tmp_path / "theirs"),
        tmp_path / "theirs" / "tokenizer_config.json",
    )
    source, target = reversed(LANGUAGES[name])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"src_lang": source, "tgt_lang": target}))
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out")])
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(place) for place in (folder, tmp_path / "out"))
    assert ours(TEXTS, text_target=TEXTS) == theirs(TEXTS, text_target=TEXTS)
    assert ours.src_lang == theirs.src_lang == source


def test_an_import_says_which_language_outputs_had(tmp_path, capsys):
    """As mbart-large-50-many-to-one-mmt, whose outputs are English."""
    multilingual.make(tmp_path / "theirs", "facebook/mbart-large-50-many-to-many-mmt")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    english = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs").convert_tokens_to_ids("en_XX")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | {"forced_bos_token_id": english}))
    import_hf.main([str(tmp_path / "theirs"), "--run", str(tmp_path / "run")])
    assert "its outputs start with en_XX only if it is named: --to en_XX" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGES)
def test_ctranslate2_writes_the_same(imported, name, tmp_path):
    """The tag of the target language is its target prefix, as its documentation has it.

    It scales the outputs of T5 models with their own heads, whatever config.json says: only their order is ours.
    """
    ctranslate2 = pytest.importorskip("ctranslate2")
    _, run, _ = imported(name)
    export_hf.main(["--run", str(run.path), str(tmp_path / "out")])
    ctranslate2.converters.TransformersConverter(str(tmp_path / "out")).convert(str(tmp_path / "converted"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    translator, (source, target) = ctranslate2.Translator(str(tmp_path / "converted")), LANGUAGES[name]
    names = [tokenizer.convert_ids_to_tokens(source_ids(tokenizer, name, text)) for text in TEXTS]
    prefix = {} if source is None else {"target_prefix": [[tag(name, target)]] * len(TEXTS)}
    kind, rows = "unused" if "umt5" in name else "extra_id", run.config.model.vocab_size - len(tokenizer)
    unused = {"suppress_sequences": [[f"<{kind}_{i}>"] for i in range(rows)]} if "mt5" in name else {}
    scaled = any(kind in name for kind in multilingual.UNTIED)
    for beams in (1,) if scaled else (1, 3):
        settings = {"beam_size": beams, "max_decoding_length": NEW} | prefix | unused
        actual = [result.hypotheses[0] for result in translator.translate_batch(names, **settings)]
        texts = [decode(tokenizer, tokenizer.convert_tokens_to_ids(row)) for row in actual]
        assert texts == our_outputs(run, name, beams, early_stopping="first", length_alpha=1.0)
    family_table.record(name, ctranslate2="greedy" if scaled else "greedy, beams")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in LANGUAGES if any(kind in name for kind in ("en-ro", "m2m", "madlad"))]
)
def test_tuning_with_languages_as_the_data_name_them(imported, name, tmp_path, capsys):
    """LoRA on the run's own settings of data; then `translate.py`, `evaluate.py` and export use the tuned run."""
    _, run, model = imported(name)
    source, target = (None if code is None else str(code).replace("_", "-") for code in ("en", LANGUAGES[name][1]))
    rows = [
        {"source": text, "target": text[::-1], "source_language": source, "target_language": target} for text in TEXTS
    ]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    cfg = dataclasses.replace(
        run.config,
        data=dataclasses.replace(run.config.data, bucket_lengths=(32,), batch_tokens=256),
        optim=OptimConfig(schedule="constant", learning_rate=0.1, warmup_steps=1),
        train=TrainConfig(steps=2, lora_rank=2, start_from=str(run.path), metric="loss"),
        parallel=ParallelConfig(data=1),
        eval=EvalConfig(batch_size=4, examples=4, samples=0),
    )
    assert training.run(experiment.build(cfg, tmp_path / "tuned", data_root=tmp_path))
    tuned = tj.load(tmp_path / "tuned")
    assert tuned.tokenizers.to_json() == run.tokenizers.to_json()
    capsys.readouterr()
    flags = ["--run", str(tmp_path / "tuned"), "--max-new-tokens", str(NEW), "--strategy", "greedy"]
    translate.main([*flags, "--to", target, "--from", "English", TEXTS[0]])
    printed = capsys.readouterr().out.splitlines()[0]
    assert [printed] == tuned.translate(
        TEXTS[:1], to=target, source_language="en", strategy="greedy", max_new_tokens=NEW
    )
    evaluate.main(
        ["--run", str(tmp_path / "tuned"), "--data", str(tmp_path), "--split", "validation", "--max-new-tokens", "4"]
    )
    export_hf.main(["--run", str(tmp_path / "tuned"), str(tmp_path / "out")])
    back = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    row = tuned._inputs(0, (tj.Request(TEXTS[0], target, "en"), "der Hund"))
    with torch.no_grad():
        ids = {"input_ids": row["source"], "decoder_input_ids": row["target_in"]}
        theirs = back(**{key: torch.tensor([value]) for key, value in ids.items()}).logits.numpy()
    assert_close(logits(tuned, {key: np.array([value], np.int32) for key, value in row.items()}), theirs, 1e-5)


def test_a_trimmed_m2m_100_is_converted_by_ctranslate2(imported, tmp_path):
    """Regression test: transformers' tokenizer counted eight rows that the trimmed model does not have."""
    _, run, _ = imported("facebook/m2m100_418M")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    vocabulary.main(["trim", str(run.path), "--texts", str(tmp_path / "texts.txt"), "--output", str(tmp_path / "run")])
    rows = {}
    for name, path in (("trimmed", tmp_path / "run"), ("whole", run.path)):
        export_hf.main(["--run", str(path), str(tmp_path / name), "--format", "ctranslate2", "--no-check"])
        written = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        rows[name] = written["num_madeup_words"]
    assert rows == {"trimmed": 0, "whole": 8}
