"""Models of Marian-NMT (`.npz`) give the runs of the Hugging Face checkpoints with the same arrays."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import yaml

import tformer_jax as tj
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.config import kinds
from tformer_jax.interop import hf, marian, sinusoids
from tformer_jax.interop.files import read_arrays

SETTINGS = {
    "type": "transformer",
    "dim-emb": 8,
    "enc-depth": 2,
    "dec-depth": 2,
    "transformer-dim-ffn": 12,
    "transformer-heads": 4,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "right-left": False,
    "transformer-tied-layers": [],
}
SEARCH = {"beam-size": 6, "normalize": 1}
ATTENTIONS = {"self_attn": "self", "encoder_attn": "context"}


def their_name(name: str) -> str:
    """Returns Marian's name of an array, spelled out here anew."""
    _, side, _, layer, *modules, leaf = name.split(".")
    stem = f"{side}_l{int(layer) + 1}_"
    if modules[0] in ("fc1", "fc2"):
        return f"{stem}ffn_{'W' if leaf == 'weight' else 'b'}{modules[0][2]}"
    part = "scale" if leaf == "weight" else "bias"
    if modules[0] == "final_layer_norm":
        return f"{stem}ffn_ffn_ln_{part}"
    if modules[0].endswith("_layer_norm"):
        return f"{stem}{ATTENTIONS[modules[0].removesuffix('_layer_norm')]}_Wo_ln_{part}"
    return f"{stem}{ATTENTIONS[modules[0]]}_{'W' if leaf == 'weight' else 'b'}{modules[1][0]}"


@pytest.fixture
def model(imported, tmp_path):
    """Returns a function that writes a checkpoint as a file of Marian with other settings and arrays."""
    folder = shutil.copytree(imported("marian")[0], tmp_path / "hf")
    vocab = json.loads((folder / "vocab.json").read_text())

    def write(settings=SETTINGS, search=SEARCH, **more):
        arrays = {"special:model.yml": np.frombuffer(yaml.dump(settings).encode() + b"\0", np.int8)}
        for name, array in read_arrays(folder).items():
            array = np.asarray(array)
            if name == "model.shared.weight":
                arrays["Wemb"] = array[:-1]
            elif name == "final_logits_bias":
                arrays["decoder_ff_logit_out_b"] = array[:, :-1]
            elif "embed" not in name:
                arrays[their_name(name)] = array.T if array.ndim == 2 else array[None]
        np.savez(tmp_path / "model.npz", **arrays, **more)
        (tmp_path / "opus.spm32k-spm32k.vocab.yml").write_text(
            yaml.dump({name: i for name, i in vocab.items() if name != "<pad>"}, allow_unicode=True)
        )
        (tmp_path / "decoder.yml").write_text(yaml.dump(search))
        for side in ("source", "target"):
            shutil.copy(folder / f"{side}.spm", tmp_path)
        return tmp_path / "model.npz"

    return write


def test_the_run_of_a_file_is_that_of_the_checkpoint(model, imported, tmp_path):
    import_hf.main([str(model()), "--run", str(tmp_path / "run")])
    actual, expected = tj.load(tmp_path / "run"), tj.load(imported("marian")[1])
    cfg = dataclasses.replace(expected.config.model, max_length=marian.MAX_LENGTH, activation="silu")
    cfg = dataclasses.replace(cfg, **sinusoids.MARIAN_NMT)
    assert actual.config.model == cfg
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)
    assert (actual.config.decode.strategy, actual.config.decode.beams) == ("beam", 6)
    assert (actual.config.decode.length_penalty, actual.config.decode.length_alpha) == ("average", 1)
    for side in ("source", "target"):
        ours, theirs = (getattr(run.tokenizers, side) for run in (actual, expected))
        never = (*theirs.special.suppressed, theirs.special.unknown)
        assert ours.special == dataclasses.replace(theirs.special, suppressed=never)
        for text in ("the cat sat", "der Hund Ω", ">>fr<< the dog"):
            assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(("given", "factor"), [({}, "3.0"), ({"max-length-factor": 1.5}, "1.5")])
def test_the_length_that_is_not_read_is_named(given, factor, model, tmp_path, capsys):
    """Regression test: that outputs end later than with Marian-NMT was said in the documentation alone."""
    import_hf.main([str(model(search=SEARCH | given)), "--run", str(tmp_path / "run")])
    assert capsys.readouterr().err == f"not applied: max-length-factor={factor}\n"


@pytest.mark.parametrize("allowed", [False, True])
def test_unknown_tokens_are_written_if_they_are_allowed(allowed, model, tmp_path):
    """As by pymarian 1.12.42, which writes nothing else for such a bias with `allow_unk=True`, and never otherwise."""
    path = model(search={"beam-size": 1, "allow-unk": allowed})
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["decoder_ff_logit_out_b"][0, 1] = 100
    np.savez(path, **arrays)
    import_hf.main([str(path), "--run", str(tmp_path / "run")])
    outputs = tj.load(tmp_path / "run").translate(["the cat"], max_new_tokens=8, unknown="show")
    assert outputs[0].count("<unk>") == 8 * allowed


def test_an_export_for_ctranslate2_has_the_same_positions(model, tmp_path, capsys):
    import_hf.main([str(model()), "--run", str(tmp_path / "run")])
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "ctranslate2"])
    assert ": log-probabilities within" in capsys.readouterr().out


def test_the_activation_and_the_search_are_those_of_marian(model, tmp_path):
    """Marian's `gelu` is `Expression<SwishNodeOp>(a, 1.702f)`, and `--normalize` is 0 by default (its sources)."""
    given = model(SETTINGS | {"transformer-ffn-activation": "gelu"}, {"beam-size": 4})
    import_hf.main([str(given), "--run", str(tmp_path / "run")])
    cfg = tj.load(tmp_path / "run").config
    assert cfg.model.activation == "gelu_sigmoid"
    x = np.linspace(-3, 3, 13)
    actual = kinds.load(kinds.ACTIVATIONS, cfg.model.activation)(x)
    np.testing.assert_allclose(actual, x / (1 + np.exp(-1.702 * x)), rtol=1e-5)
    assert (cfg.decode.beams, cfg.decode.length_alpha) == (4, 0)
    with pytest.raises(UserError, match="word-penalty=0.5 of decoder.yml is not supported; remove it there"):
        marian.unpack(model(search={"word-penalty": 0.5}), tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transformer-preprocess": "n"}, "transformer-preprocess='n' of special:model.yml is not supported, only ''"),
        ({"right-left": True}, "right-left='true' of special:model.yml is not supported, only 'false'"),
        ({"transformer-attention-mask": "alibi"}, "transformer-attention-mask='alibi' of special:model.yml is not"),
        ({"transformer-disable-position-embeddings": True}, "disable-position-embeddings='true' of special:model.yml"),
        ({"dim-emb": None}, "the model of Marian has no 'dim-emb' in special:model.yml"),
    ],
)
def test_other_models_are_refused(settings, message, model, tmp_path):
    given = {name: value for name, value in (SETTINGS | settings).items() if value is not None}
    with pytest.raises(UserError, match=message):
        marian.unpack(model(given), tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("opus.spm32k-spm32k.vocab.yml", "</s>: 0\n: [", "vocab.yml is damaged"),
        ("opus.spm32k-spm32k.vocab.yml", "</s>", "vocab.yml has no lines of names and values"),
        ("opus.spm32k-spm32k.vocab.yml", "</s>: x", "the ids of .*vocab.yml are not 0, 1, 2"),
        ("decoder.yml", "- beam-size", "decoder.yml has no lines of names and values"),
        ("decoder.yml", "beam-size: many", "decoder.yml: beam-size is 'many': it must be a number"),
        ("decoder.yml", "max-length-factor: [3]", r"decoder.yml: max-length-factor is \['3'\]: it must be a number"),
    ],
)
def test_damaged_files_of_names_are_named(name, text, message, model, tmp_path):
    """Regression test: errors of PyYAML and Python ended the command."""
    path = model()
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        marian.unpack(path, tmp_path / "hf")


@pytest.mark.parametrize(
    ("last", "message"),
    [({"<pad>": "48"}, "vocab.yml has the token <pad>"), ({}, "its embedding has 49 rows, but .*vocab.yml 48 tokens")],
)
def test_vocabularies_that_do_not_fit_are_named(last, message, model, tmp_path):
    """Regression test: a vocabulary with <pad> was said to have other tokens than the embedding has rows."""
    path, file = model(), tmp_path / "opus.spm32k-spm32k.vocab.yml"
    names = yaml.load(file.read_text(), yaml.BaseLoader)
    file.write_text(yaml.dump({name: i for name, i in names.items() if i != "48"} | last, allow_unicode=True))
    with pytest.raises(UserError, match=message):
        marian.unpack(path, tmp_path / "hf")


def test_files_that_do_not_fit_are_named(model, tmp_path):
    path = model(decoder_Wpos=np.zeros((3, 8), np.float32))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="the checkpoint has arrays that the model does not: decoder_Wpos"):
        hf.load(tmp_path / "out", arrays=marian.unpack(path, tmp_path / "out"))
    (tmp_path / "source.spm").unlink()
    with pytest.raises(UserError, match=r"has 0 files source\.spm, but a model of Marian needs one beside it"):
        marian.unpack(path, tmp_path / "out")
    path.write_bytes(b"PK")
    with pytest.raises(UserError, match="is not a model of Marian-NMT, or is damaged"):
        marian.unpack(path, tmp_path / "out")
