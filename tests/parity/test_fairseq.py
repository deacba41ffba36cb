"""State dicts of fairseq's transformer compute what FSMT, its port in transformers, computes."""

import argparse

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close
from tformer_jax.base.errors import UserError
from tformer_jax.cli import import_hf
from tformer_jax.data.tokenizers.standalone import load_standalone_tokenizers

WORDS = {"en": ["the", "cat", "sat", "do@@", "gs"], "de": ["die", "Katze", "saß", "Hun@@"]}
SIZES = {"d_model": 8, "num_hidden_layers": 2} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 12))
}


@pytest.fixture(scope="module")
def model():
    vocab = {"src_vocab_size": 4 + len(WORDS["en"]), "tgt_vocab_size": 4 + len(WORDS["de"])}
    config = transformers.FSMTConfig(langs=["en", "de"], **SIZES, **vocab, scale_embedding=True)
    made = transformers.FSMTForConditionalGeneration(config).eval()
    torch.manual_seed(0)
    for name, parameter in made.named_parameters():
        if "embed_positions" not in name:
            torch.nn.init.normal_(parameter, std=0.4)
    return made


def save(model, folder, **content) -> list[str]:
    """Writes a checkpoint and dictionaries of fairseq; returns the flags of the command."""
    arrays = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    arrays = {name: value for name, value in arrays.items() if "embed_positions" not in name}
    arrays |= {f"{side}.version": torch.tensor([3.0]) for side in ("encoder", "decoder")}
    torch.save({"model": arrays, "args": None, **content}, folder / "checkpoint_best.pt")
    for language, words in WORDS.items():
        (folder / f"dict.{language}.txt").write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")
    files = [str(folder / f"dict.{language}.txt") for language in WORDS]
    return [str(folder / "checkpoint_best.pt"), "--run", str(folder / "run"), "--tokenizer", *files]


def test_logits_and_tokens(model, tmp_path):
    cfg = {"model": {"encoder_attention_heads": 2, "activation_fn": "relu", "arch": "transformer_iwslt_de_en"}}
    import_hf.main(save(model, tmp_path, cfg=cfg))
    run = tj.load(tmp_path / "run")
    tokenizers = run.tokenizers
    source = tokenizers.source.special.wrap_side(tokenizers.source.encode("the do@@ gs sat"))
    assert source == [4, 7, 8, 6, 2]
    target = [tokenizers.target.special.start, *tokenizers.target.encode("die Hun@@ niemals")]
    assert target == [2, 4, 7, 3]
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
        expected = model(**inputs, use_cache=False).logits.numpy()
    actual = run.model.apply({"params": run.params}, jnp.asarray([source]), jnp.asarray([target]))
    assert_close(np.asarray(actual), expected, 1e-4)


def test_other_objects_are_not_unpickled(model, tmp_path):
    flags = save(model, tmp_path, cfg={"model": argparse.Namespace(encoder_attention_heads=2)})
    with pytest.raises(UserError, match="other objects than tensors, which are never unpickled: save model.state_dict"):
        import_hf.main(flags)
    flags = save(model, tmp_path)
    with pytest.raises(UserError, match="encoder_attention_heads is missing"):
        import_hf.main(flags)
    (tmp_path / "dict.en.txt").write_text("the 1\n")
    with pytest.raises(UserError, match=r"dict\.en\.txt has 5 different tokens, but the model was trained on 9: name"):
        import_hf.main([*flags, "--model-args", "encoder_attention_heads=2"])


def test_a_dictionary_has_a_token_per_line(tmp_path):
    """As fairseq reads it: other line separators are tokens, and a flag gives a token the later id."""
    path = tmp_path / "dict.en.txt"
    path.write_text("the 9\n\u2028 5\n\x85 4\ncat 3\nthe 1 #fairseq:overwrite\n", encoding="utf-8")
    tokenizer = load_standalone_tokenizers([path], pair=True).source
    assert (tokenizer.vocab_size, tokenizer.encode("the cat")) == (9, [8, 7])


def test_lines_with_names_of_special_tokens(tmp_path):
    """Regression test: sources ended in another token than fairseq's </s>, and unknown words had another id than <unk>.

    fairseq's message about duplicate words advises to add the flag to such lines; spaces at the end of a line are none.
    """
    path = tmp_path / "dict.en.txt"
    special = "".join(f"{name} 0 #fairseq:overwrite\n" for name in ("<unk>", "<s>", "</s>"))
    path.write_text(f"{special}the 9\ncat 3 \n", encoding="utf-8")
    tokenizer = load_standalone_tokenizers([path], pair=True).source
    assert tokenizer.vocab_size == 9
    assert tokenizer.special.wrap_side(tokenizer.encode("the dog cat")) == [7, 3, 8, 2]
    assert (tokenizer.special.start, tokenizer.decode([7, 8, 2, 7])) == (2, "the cat")
