"""What other programs read beside a model travels with an imported run: chat templates, lengths, pooling."""

import dataclasses
import json
import shutil

import pytest
import transformers

import tformer_jax as tj
from tests.parity import own_runs
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.runs import run_folder, weights

CHAT = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def there_and_back(folder, place):
    import_hf.main([str(folder), "--run", str(place / "run")])
    export_hf.main(["--run", str(place / "run"), str(place / "out"), "--no-check"])
    return place / "out"


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_chat_template_and_the_length_of_a_tokenizer(in_a_file, imported, tmp_path):
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    options = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "model_max_length": 77,
        "padding_side": "left",
    }
    if in_a_file:
        (folder / "chat_template.jinja").write_text(CHAT)
    else:
        options["chat_template"] = CHAT
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(place) for place in (folder, there_and_back(folder, tmp_path))
    )
    assert ours.chat_template == theirs.chat_template == CHAT
    assert (ours.model_max_length, ours.padding_side) == (theirs.model_max_length, theirs.padding_side) == (77, "left")
    rendered = [tokenizer.apply_chat_template(MESSAGES, tokenize=False) for tokenizer in (theirs, ours)]
    assert rendered == ["<user>the cat<assistant>sat"] * 2


def test_the_files_of_sentence_transformers(imported, tmp_path, capsys):
    folder = shutil.copytree(imported("bert")[0], tmp_path / "copy")
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    written = {
        "modules.json": json.dumps(modules),
        "1_Pooling/config.json": json.dumps({"word_embedding_dimension": 8, "pooling_mode_cls_token": True}),
        "sentence_bert_config.json": json.dumps({"max_seq_length": 20, "do_lower_case": False}),
        "config_sentence_transformers.json": json.dumps({"prompts": {}, "default_prompt_name": None}),
    }
    (folder / "1_Pooling").mkdir()
    for name, text in written.items():
        (folder / name).write_text(text)
    out = there_and_back(folder, tmp_path)
    assert {name: (out / name).read_text() for name in written} == written
    changed = json.loads((tmp_path / "run" / "config.json").read_text())
    changed["embed"] |= {"pooling": "mean"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(changed))
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "other"), "--no-check"])
    assert not [name for name in written if (tmp_path / "other" / name).exists()]
    assert (
        "not written: modules.json of sentence-transformers, because the run has embed.pooling='mean'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_length_of_an_own_run_is_that_of_its_model(name, tmp_path):
    run = own_runs.make(tmp_path / "run", name, max_length=24)
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")  # whose target is written
    export_hf.main(["--run", str(run), "--model-type", name, str(tmp_path / "out"), "--no-check"])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 24


def start_from(start, folder, tokenizers=None):
    """Makes a run with the weights of the run that it started from."""
    first = tj.load(start)
    cfg = dataclasses.replace(first.config, train=dataclasses.replace(first.config.train, start_from=str(start)))
    run_folder.create(folder, cfg, tokenizers or first.tokenizers, None)
    weights.save(folder, first.params, "last", [], 0)


def imported_chat(imported, tmp_path):
    """Makes the run of a checkpoint with a chat template, whose texts are padded on the left."""
    folder = shutil.copytree(imported("llama")[0], tmp_path / "copy")
    options = json.loads((folder / "tokenizer_config.json").read_text()) | {"padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "chat_template.jinja").write_text(CHAT)
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])


def test_a_run_that_started_from_an_imported_one_through_another(imported, tmp_path, capsys):
    """Regression test: it lost the fields of the checkpoint, which is right, and said, only if a run is missing."""
    imported_chat(imported, tmp_path)
    start_from(tmp_path / "run", tmp_path / "first")
    start_from(tmp_path / "first", tmp_path / "second")

    def padding_side(name: str) -> str | None:
        export_hf.main(["--run", str(tmp_path / "second"), "--no-check", str(tmp_path / name)])
        return json.loads((tmp_path / name / "tokenizer_config.json").read_text()).get("padding_side")

    assert padding_side("out") == "left" and "does not exist" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    assert padding_side("lost") is None
    assert f"{tmp_path / 'run'}, from which {tmp_path / 'first'} started, does not exist" in capsys.readouterr().err
    shutil.copytree(tmp_path / "second", tmp_path / "run")  # from which `first` started, from which this one started
    assert padding_side("circle") is None and "does not exist" not in capsys.readouterr().err


@pytest.mark.parametrize("same_tokenizer", [True, False])
def test_a_run_that_started_from_an_imported_one(same_tokenizer, imported, tmp_path):
    """It keeps the files if it keeps the tokenizer."""
    imported_chat(imported, tmp_path)
    start_from(tmp_path / "run", tmp_path / "tuned", None if same_tokenizer else other_tokenizers())
    export_hf.main(["--run", str(tmp_path / "tuned"), str(tmp_path / "out"), "--no-check"])
    assert (tmp_path / "out" / "chat_template.jinja").exists() is same_tokenizer


def other_tokenizers():
    """Returns other tokenizers of at most 64 tokens."""
    words = own_runs.tokenizer("words")
    return Tokenizers(words, words)
