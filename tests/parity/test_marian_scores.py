"""A model of Marian-NMT has the scores of Marian-NMT itself, also as an export for transformers and CTranslate2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
import yaml

from tformer_jax.base.errors import UserError
from tformer_jax.interop import hf, marian, sinusoids
from tformer_jax.models import registry

D, V, LAYERS, F = 16, 24, 2, 24
SETTINGS = {
    "type": "transformer",
    "dim-vocabs": [V, V],
    "dim-emb": D,
    "enc-depth": LAYERS,
    "dec-depth": LAYERS,
    "transformer-dim-ffn": F,
    "transformer-heads": 4,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "tied-embeddings-all": True,
    "transformer-tied-layers": [],
    "transformer-decoder-autoreg": "self-attention",
    "version": "v1.12.42",
}
OUTPUT = [14] * 8
SCORES = [-0.74948, -0.78956, -0.79378, -0.79767, -0.79921, -0.80188, -0.80365, -0.80399]
"""Log-probabilities of `OUTPUT` by pymarian 1.12.42, which findings/marian_positions.sh runs on this model."""
SOURCE = " ".join(f"w{i * i % 22}" for i in range(40))


def write_model(folder) -> None:
    """Writes `model.npz` and `vocab.yml`, which PyPI's pymarian 1.12.42 reads as well."""
    random = np.random.default_rng(0)

    def draw(*shape: int, mean: float = 0.0, std: float = 0.4) -> np.ndarray:
        return random.normal(mean, std, shape).astype(np.float32)

    arrays = {"Wemb": draw(V, D), "decoder_ff_logit_out_b": draw(1, V)}
    for side, attentions in (("encoder", ("self",)), ("decoder", ("self", "context"))):
        for layer in range(1, LAYERS + 1):
            stem = f"{side}_l{layer}_"
            for name in attentions:
                arrays |= {f"{stem}{name}_W{role}": draw(D, D) for role in "qkvo"}
                arrays |= {f"{stem}{name}_b{role}": draw(1, D) for role in "qkvo"}
            arrays |= {f"{stem}ffn_W1": draw(D, F), f"{stem}ffn_b1": draw(1, F)}
            arrays |= {f"{stem}ffn_W2": draw(F, D), f"{stem}ffn_b2": draw(1, D)}
            for name in (*(f"{name}_Wo" for name in attentions), "ffn_ffn"):
                arrays |= {f"{stem}{name}_ln_scale": draw(1, D, mean=1.0), f"{stem}{name}_ln_bias": draw(1, D)}
    arrays["special:model.yml"] = np.frombuffer(yaml.dump(SETTINGS).encode() + b"\0", np.int8)
    np.savez(folder / "model.npz", **arrays)
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *(f"w{i}" for i in range(V - 2))])}
    (folder / "vocab.yml").write_text(yaml.dump(vocab))


def test_scores_are_those_of_marian(tmp_path):
    """Regression test: positions had the wavelengths of transformers (see findings/marian_positions.sh)."""
    write_model(tmp_path)
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").touch()
    theirs, exported = tmp_path / "theirs", tmp_path / "exported"
    theirs.mkdir()
    cfg, params = hf.load(theirs, arrays=marian.unpack(tmp_path / "model.npz", theirs))
    vocab = yaml.safe_load((tmp_path / "vocab.yml").read_text())
    sources = [[*(vocab[word] for word in SOURCE.split()), vocab["</s>"]]]
    read = [[V, *OUTPUT[:-1]]]  # the token after the last is padding, which starts the decoder
    logits = registry.build(cfg).apply({"params": params}, jnp.array(sources), jnp.array(read))
    log_probs = jax.nn.log_softmax(logits[0, :, :V])
    np.testing.assert_allclose(log_probs[jnp.arange(len(OUTPUT)), jnp.array(OUTPUT)], SCORES, atol=2e-5)
    hf.save(exported, "marian", cfg, params, pad_token_id=V, decoder_start_token_id=V)
    model = transformers.MarianMTModel.from_pretrained(exported).eval()
    with torch.no_grad():
        same = model(input_ids=torch.tensor(sources), decoder_input_ids=torch.tensor(read)).logits.numpy()
    np.testing.assert_allclose(same, logits, rtol=0, atol=1e-4)
    assert hf.load(exported)[0] == cfg


def test_other_tables_of_positions_are_refused(tmp_path):
    write_model(tmp_path)
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").touch()
    (tmp_path / "theirs").mkdir()
    arrays = marian.unpack(tmp_path / "model.npz", tmp_path / "theirs")
    arrays[sinusoids.NAMES[1]] = sinusoids.table(marian.MAX_LENGTH, D, "sinusoidal_halves")
    with pytest.raises(UserError, match="encoder.embed_positions.weight has other positions than sinusoids, or than"):
        hf.load(tmp_path / "theirs", arrays=arrays)
