"""Multilingual encoder-decoders, imported and exported by the commands, with the languages of transformers' classes.

The weights are random. Of the configs in `published.json`, that of mt5-small was compared with copies in public
repositories, and those of NLLB and mbart-large-en-ro in part; the others are written from their documentation.
"""

import numpy as np
import pytest
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import multilingual
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.cli.export_checks import logits

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
    found = []
    for text in TEXTS:
        ids = torch.tensor([source_ids(tokenizer, name, text)])
        settings = {"num_beams": beams, "max_new_tokens": NEW, "do_sample": False} | first | unused
        with torch.no_grad():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0]
        output = [i for i in output.tolist() if not tokenizer.convert_ids_to_tokens(i).startswith(("<2", "__"))]
        found.append(tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return found


def tag(name: str, language: str) -> str:
    return f"__{language}__" if "m2m100" in name else language


def our_outputs(run: tj.Run, name: str, beams: int) -> list[str]:
    source, target = LANGUAGES[name]
    settings = {"strategy": "greedy"} if beams == 1 else {"beams": beams}
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
        assert_close(logits(run, batch), theirs, 1e-5, proves=(f"whole model: {name}", type(model).__name__))


@pytest.mark.parametrize("name", rest_slow(LANGUAGES.keys(), 1))
def test_outputs_of_the_import_and_of_the_export(imported, name, tmp_path):
    folder, run, model = imported(name)
    export_hf.main(["--run", str(run.path), str(tmp_path / "out")])
    back = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    for key, array in model.state_dict().items():
        np.testing.assert_array_equal(back.state_dict()[key], array)
    for beams in (1, 3):
        found = our_outputs(run, name, beams)
        for place, theirs in ((folder, model), (tmp_path / "out", back)):
            tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            assert found == their_outputs(tokenizer, theirs, name, beams)
    assert len(set(found)) > 1
