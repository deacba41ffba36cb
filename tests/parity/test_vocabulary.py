"""Published tokenizers without the tokens that texts never use, against transformers and the `tokenizers` library."""

import json

import pytest
import transformers

from tests.parity import checkpoints, multilingual
from tests.parity.checkpoints import TEXTS
from tests.parity.test_adapters import save_adapter
from tformer_jax.base.errors import UserError
from tformer_jax.cli import export_hf, import_hf, vocabulary
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.exported import export_tokenizers
from tformer_jax.data.tokenizers.language_tags import tag_names
from tformer_jax.data.tokenizers.surgery import extend, needed_tokens, trim
from tformer_jax.interop import hf


@pytest.mark.parametrize("name", multilingual.MAKERS)
def test_published_vocabularies(name, tmp_path):
    sizes = multilingual.MAKERS[name](tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(multilingual.PUBLISHED[name] | sizes))
    tokenizer = load_checkpoint_tokenizers(tmp_path).target
    texts = [TEXTS[0], "a cat"]
    used = {i for row in tokenizer.encode_batch(texts) for i in row}
    trimmed = trim(tokenizer, needed_tokens(tokenizer, used))
    extended = extend(trimmed.tokenizer, ["▁sattt"], languages=["haw"])
    saved = Tokenizers(trimmed.tokenizer, extended.tokenizer).to_json()
    restored = Tokenizers.from_json(json.loads(json.dumps(saved)))
    assert len(trimmed.rows) == restored.source.vocab_size < tokenizer.vocab_size
    for text in texts:
        ids = restored.source.encode(text)
        assert [trimmed.rows[i][0] for i in ids] == tokenizer.encode(text)
        assert restored.source.decode(ids) == tokenizer.decode(tokenizer.encode(text))
        assert [extended.rows[i][0] for i in restored.target.encode(text)] == ids
    assert tag_names(restored.source) == tag_names(tokenizer)
    assert tag_names(restored.target) == [*tag_names(tokenizer), "<2haw>"]
    assert restored.target.vocabulary()[1]["▁sattt"] in restored.target.encode("cat sattt")
    for mine, theirs in ((restored.source, tokenizer), (restored.target, restored.source)):
        rows = trimmed.rows if mine is restored.source else extended.rows
        for field in ("start", "bos", "pad", "unknown"):
            new, old = getattr(mine.special, field), getattr(theirs.special, field)
            assert old is None if new is None else rows[new] == (old,)


@pytest.mark.parametrize(("name", "model_type"), [("google/mt5-small", "mt5"), ("facebook/m2m100_418M", "m2m_100")])
def test_symbols_of_sentencepiece_models_are_not_exported(name, model_type, tmp_path):
    """Regression test: the reason named a kind of tokenizer and its ids, but not the symbols."""
    sizes = multilingual.MAKERS[name](tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(multilingual.PUBLISHED[name] | sizes))
    tokenizer = load_checkpoint_tokenizers(tmp_path).target
    for symbols, expected in (((), None), (["<br>"], "reads a SentencePiece model with the symbols or tags '<br>'")):
        added = extend(tokenizer, ["▁sattt"], symbols).tokenizer
        why_not = export_tokenizers(tmp_path, Tokenizers(added, added), model_type, pair=True)
        assert why_not == (expected and f"no class of transformers {expected}")


def test_symbols_after_which_transformers_reads_a_word_otherwise_are_not_exported(tmp_path):
    """Regression test: only the first word of a text has a "▁" there, here also the first one after a symbol."""
    checkpoints.llama(tmp_path)
    options = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    added = extend(load_checkpoint_tokenizers(tmp_path).target, [], ["<br>"]).tokenizer
    why_not = export_tokenizers(tmp_path, Tokenizers(added, added), "llama", pair=False)
    assert why_not == "tokenizer.json cannot hold data.symbols with '<br>'"


@pytest.mark.parametrize(("kind", "expected"), [("t5", True), ("gpt2", False)])
def test_an_export_says_if_spaces_before_symbols_are_lost(kind, expected, tmp_path, capsys):
    """Regression test: AutoTokenizer writes "a<br> b" for the output "a <br> b" of the run, and nothing said so."""
    (tmp_path / "theirs").mkdir()
    checkpoints.MAKERS[kind](tmp_path / "theirs")
    run, extended, exported = (str(tmp_path / name) for name in ("run", "extended", "exported"))
    import_hf.main([str(tmp_path / "theirs"), "--run", run])
    vocabulary.main(["extend", run, "--symbols", "<br>", "--output", extended])
    export_hf.main(["--run", extended, exported])
    said = "AutoTokenizer decodes may lack the space before a symbol, such as '<br>'" in capsys.readouterr().err
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = Tokenizers.load(tmp_path / "extended" / "tokenizers").target
    ids = ours.encode("a<br> cat")
    assert theirs("a<br> cat", add_special_tokens=False)["input_ids"] == ids
    assert said is (theirs.decode(ids) != ours.decode(ids)) is expected


def test_an_adapter_with_another_vocabulary_is_named(imported, tmp_path):
    """Regression test: its array was said to be the checkpoint's."""
    folder = imported("llama")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(66)
    save_adapter(model, tmp_path, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    with pytest.raises(UserError, match=r"weight: the adapter has the shape \(66, 8\), and its base \(64"):
        hf.load(folder, adapter=tmp_path)
