"""Folders of sentence-transformers: texts are embedded as their modules and settings say."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tformer_jax.base.errors import UserError
from tformer_jax.cli import embed, import_hf
from tformer_jax.config import EmbedConfig
from tformer_jax.inference.encoding import LongTexts
from tformer_jax.interop import sentence_transformers

TEXTS = ["the cat sat on the mat", "a", "the dog sat on the log and the cat sat on the mat"]
MODES = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
FLAGS = {"cls": "cls_token", "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}


def sentence_folder(source, folder, *, mode="mean", normalize=True, flags=False, modules=(), **settings):
    """Copies a checkpoint, and adds what sentence-transformers writes; `settings` are those of its files."""
    shutil.copytree(source, folder)
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), *modules, *([("Normalize", "2_Normalize")] * normalize)]
    entries = [
        {"idx": i, "name": str(i), "type": f"sentence_transformers.models.{kind}", "path": path}
        for i, (kind, path) in enumerate(listed)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    pooling = {
        f"pooling_mode_{FLAGS.get(m, f'{m}_tokens' if m != 'mean_sqrt_len_tokens' else m)}": m == mode for m in MODES
    }
    pooling = pooling if flags else {"pooling_mode": mode}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"embedding_dimension": 8} | pooling | settings.get("pooling", {}))
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9} | settings.get("bert", {})))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings.get("prompts", {})))
    return folder


def imported_run(folder, tmp_path):
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    return tj.load(tmp_path / "run")


def pooled(states, mode):
    """Pools states [T, D] by hand."""
    T = len(states)
    weights = torch.arange(1.0, T + 1)[:, None]
    return {
        "cls": lambda: states[0],
        "max": lambda: states.max(0).values,
        "mean": lambda: states.sum(0) / T,
        "mean_sqrt_len_tokens": lambda: states.sum(0) / T**0.5,
        "weightedmean": lambda: (weights * states).sum(0) / weights.sum(),
        "lasttoken": lambda: states[-1],
    }[mode]()


def expected_embeddings(folder, texts, mode, *, normalize, longest=9):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            row = pooled(model(ids).last_hidden_state[0], mode)
        rows.append(row / row.norm() if normalize else row)
    return torch.stack(rows).numpy()


def truncated(run, **how):
    return np.stack(list(run.embedder(**how).stream(run.params, TEXTS, long_texts=LongTexts("truncate"))))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", [False, True])
def test_what_is_read(imported, mode, flags, tmp_path):
    """Also the flags of earlier versions."""
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy", mode=mode, flags=flags)
    actual = sentence_transformers.read_embedding(folder, tj.load(imported("bert")[1]).tokenizers.source, 32)
    assert actual == EmbedConfig(pooling=MODES[mode], normalize=True, max_length=9)
    assert sentence_transformers.read_embedding(folder, None, 8) == EmbedConfig(pooling=MODES[mode], normalize=True)


@pytest.mark.parametrize(
    "mode", rest_slow(["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"], 1)
)
def test_each_pooling(imported, mode, tmp_path):
    """A longer text is refused, or cut as sentence-transformers does."""
    normalize = mode != "mean"
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy", mode=mode, normalize=normalize)
    run = imported_run(folder, tmp_path)
    cfg = run.config.embed
    assert (cfg.pooling, cfg.normalize, cfg.max_length) == (MODES[mode], normalize, 9)
    assert_close(truncated(run), expected_embeddings(folder, TEXTS, mode, normalize=normalize), 1e-5)
    with pytest.raises(UserError, match="text 3: the text has 13 tokens, but the model takes at most 7: shorten it"):
        run.embed(TEXTS)


def test_the_command_uses_the_settings_of_the_run_unless_told_otherwise(imported, tmp_path, capsys):
    prompts = {"prompts": {"query": "the dog ", "none": ""}, "default_prompt_name": "query"}
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy", prompts=prompts, bert={"max_seq_length": 30})
    run = imported_run(folder, tmp_path)
    assert "modules.json of sentence-transformers: embed.normalize=True, embed.max_length=30" in capsys.readouterr().err

    def printed(*flags):
        embed.main(["--run", str(run.path), *TEXTS, *flags])
        return np.array([list(map(float, line.split(" "))) for line in capsys.readouterr().out.splitlines()])

    prompted = [f"the dog {text}" for text in TEXTS]
    expected = expected_embeddings(folder, prompted, "mean", normalize=True, longest=30)
    assert_close(printed(), expected, 1e-5)
    plain = expected_embeddings(folder, TEXTS, "lasttoken", normalize=False, longest=30)
    assert_close(printed("--prompt", "none", "--pooling", "last", "--no-normalize"), plain, 1e-5)
    assert_close(
        run.embed(TEXTS, prompt=""), expected_embeddings(folder, TEXTS, "mean", normalize=True, longest=30), 1e-5
    )
    with pytest.raises(UserError, match="there is no prompt 'qury' for embeddings; did you mean 'query'?"):
        printed("--prompt", "qury")


REFUSED = {
    "the module Dense": {"modules": [("Dense", "2_Dense")]},
    "the pooling cls with mean": {"mode": ["cls", "mean"]},
    "the pooling median": {"mode": "median"},
    "include_prompt=False": {"pooling": {"include_prompt": False}},
}
WRONG_TYPES = {
    "1_Pooling/config.json": {"pooling_mode": 5},
    "sentence_bert_config.json": {"max_seq_length": "16"},
    "config_sentence_transformers.json": {"prompts": ["x"]},
}


@pytest.mark.parametrize("file", WRONG_TYPES)
def test_settings_of_the_wrong_type_are_refused(imported, file, tmp_path):
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy")
    (folder / file).write_text(json.dumps(WRONG_TYPES[file]))
    with pytest.raises(UserError, match=r"a setting of sentence-transformers has the wrong type .*; correct it, or re"):
        imported_run(folder, tmp_path)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused(imported, what, tmp_path):
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy", **REFUSED[what])
    with pytest.raises(UserError, match=f"modules.json: {what} of sentence-transformers is not supported: remove"):
        imported_run(folder, tmp_path)
    assert not (tmp_path / "run").exists()


def test_modules_that_are_no_list_are_refused(imported, tmp_path):
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy")
    (folder / "modules.json").write_text("3")
    with pytest.raises(UserError, match=r"modules.json is not a list of modules of sentence-transformers"):
        imported_run(folder, tmp_path)


@pytest.mark.parametrize("lower", [False, True])
def test_lower_case_before_a_tokenizer_that_reads_upper_case(imported, lower, tmp_path):
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy", bert={"do_lower_case": True})
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    vocab = (folder / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(vocab.replace("\ncat\n", "\nAb\n"))
    if lower:
        imported_run(folder, tmp_path)
        return
    with pytest.raises(UserError, match="do_lower_case=True in sentence_bert_config.json with a tokenizer of upper"):
        imported_run(folder, tmp_path)


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_embeddings_equal_those_of_sentence_transformers(imported, mode, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = sentence_folder(imported("bert")[0], tmp_path / "copy", mode=mode)
    run = imported_run(folder, tmp_path)
    assert_close(truncated(run), library.SentenceTransformer(str(folder)).encode(TEXTS), 1e-5)
