"""Exported tokenizers of encoders join pairs of texts as the class of transformers does, with its special tokens."""

import json
from pathlib import Path

import pytest
import transformers

from tests.parity import checkpoints, test_encoders
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.exported import export_tokenizers
from tformer_jax.interop import companions


def albert(folder: Path) -> dict:
    """A tokenizer.json without a template; the class adds its own only to such a file."""
    sizes, file = test_encoders.albert(folder), folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    return sizes


MAKERS = {
    "albert": albert,
    "albert with a template": test_encoders.albert,
    "bart": checkpoints.bart_tokenizer,
    "bert": checkpoints.word_pieces,
    "distilbert": test_encoders.distilbert,
    "roberta": test_encoders.roberta,
    "t5": lambda folder: {"vocab_size": checkpoints.t5(folder).config.vocab_size},
    "xlm-roberta": test_encoders.xlm_roberta,
}


@pytest.mark.parametrize("roles", ["of the class", "in special_tokens_map.json", "in tokenizer_config.json"])
@pytest.mark.parametrize("kind", MAKERS)
def test_pairs_and_roles(kind, roles, tmp_path):
    """Files are as published; with roles in a file, they are as transformers saves them, with `tokenizer.json`."""
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    model_type = kind.split()[0]
    ids = {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = MAKERS[kind](old)
    (old / "tokenizer_config.json").unlink(missing_ok=True)
    (old / "config.json").write_text(json.dumps({"model_type": model_type, **ids, "vocab_size": sizes["vocab_size"]}))
    theirs = transformers.AutoTokenizer.from_pretrained(old)
    if roles != "of the class":
        theirs.save_pretrained(old)
    if roles == "in special_tokens_map.json":
        options = json.loads((old / "tokenizer_config.json").read_text())
        names = {name: options.pop(name) for name in [*options] if name in theirs.special_tokens_map}
        (old / "special_tokens_map.json").write_text(json.dumps(names))
        (old / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizers = load_checkpoint_tokenizers(old)
    assert export_tokenizers(new, tokenizers, model_type, pair=kind in ("bart", "t5")) is None
    companions.write(new, companions.read(old, tokenizers.target), 32)
    (new / "config.json").write_text((old / "config.json").read_text())
    ours = transformers.AutoTokenizer.from_pretrained(new)
    for texts in (("the cat", "a dog"), ("the cat",)):
        assert ours(*texts) == theirs(*texts)
        assert ours(*texts, return_token_type_ids=True) == theirs(*texts, return_token_type_ids=True)
    for role in ("cls_token", "sep_token", "mask_token", "unk_token"):
        assert getattr(ours, role) == getattr(theirs, role), role
    if kind in ("bert", "distilbert"):
        assert json.loads((new / "tokenizer_config.json").read_text())["do_lower_case"] == theirs.do_lower_case
