"""Encoders with other layers than BERT, imported and exported by the commands, with each published tokenizer.

The weights are random, and the configs are those of `published.json` with small sizes.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file

import tformer_jax as tj
from tests.helpers import assert_close, load_into, rest_slow
from tests.parity import checkpoints, family_table, multilingual, test_sentence
from tformer_jax.cli import export_hf, import_hf
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.interop import sentence_transformers
from tformer_jax.runs.start_from import find_mismatches

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
TEXTS = ["the cat sat on the mat", "a dog", "der Hund und die Katze", " Ω two  spaces", ""]
LABELS = {"0": "bad", "1": "good", "2": "neither"}
SMALL = checkpoints.SIZES | {"max_position_embeddings": 34}
BYTES = tokenizers.pre_tokenizers.ByteLevel.alphabet()


def byte_pairs(special: list[str]) -> tokenizers.Tokenizer:
    return checkpoints.trained(tokenizers.models.BPE(), tokenizers.trainers.BpeTrainer, special, metaspace=False)


def roberta(folder: Path) -> dict:
    """`vocab.json` and `merges.txt` alone."""
    library = byte_pairs(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    library.model.save(str(folder))
    return SMALL | {"vocab_size": library.get_vocab_size()}


def xlm_roberta(folder: Path) -> dict:
    """A SentencePiece model alone."""
    (folder / "sentencepiece.bpe.model").write_bytes(multilingual.pieces())
    made = transformers.XLMRobertaTokenizer.from_pretrained(folder)
    return SMALL | {"vocab_size": len(made)}


def distilbert(folder: Path) -> dict:
    """`vocab.txt` alone."""
    sizes = {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
    return sizes | {"vocab_size": checkpoints.word_pieces(folder)["vocab_size"], "pad_token_id": 1}


def modernbert(folder: Path) -> dict:
    """`tokenizer.json`; the vocabulary of the model is larger."""
    special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"]
    library = byte_pairs(special)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "unk", "mask")}
    checkpoints.save_tokenizer(folder, library, **names)
    ids = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 1, "sep_token_id": 1, "pad_token_id": 2}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 32, "local_attention": 4}
    return checkpoints.SIZES | sizes | ids | {"vocab_size": library.get_vocab_size() + 5}


def albert(folder: Path) -> dict:
    """`tokenizer.json` of pieces."""
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    trainer = lambda **options: tokenizers.trainers.UnigramTrainer(unk_token="<unk>", **options)  # noqa: E731
    library = checkpoints.trained(tokenizers.models.Unigram(), trainer, special, metaspace=True)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    names |= {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "mask")}
    checkpoints.save_tokenizer(folder, library, **names)
    return SMALL | {
        "max_position_embeddings": 60,
        "embedding_size": 6,
        "num_hidden_layers": 3,
        "vocab_size": library.get_vocab_size(),
    }


MAKERS = {
    "albert/albert-base-v2": albert,
    "answerdotai/ModernBERT-base": modernbert,
    "FacebookAI/roberta-base": roberta,
    "FacebookAI/xlm-roberta-base": xlm_roberta,
    "distilbert/distilbert-base-uncased": distilbert,
}


def make(folder: Path, name: str, head: str, **fields) -> torch.nn.Module:
    """Saves a model with a head, with its config as published except for sizes and `fields`, and returns it."""
    config = PUBLISHED[name] | MAKERS[name](folder) | fields
    if head != "ForMaskedLM":
        kind = config["architectures"][0].removesuffix("ForMaskedLM") + head
        config |= {"architectures": [kind], "id2label": LABELS}
    given = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "torch_dtype")}
    model = checkpoints.save(folder, config["architectures"][0], given)
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns a function that makes the folder, the run and transformers' model of a name and a head, once."""
    made = {}

    def get(name: str, head: str):
        if (name, head) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            model = make(folder, name, head)
            import_hf.main([str(folder), "--run", str(folder.with_name(f"{folder.name}_run"))])
            made[name, head] = folder, tj.load(folder.with_name(f"{folder.name}_run")), model
        return made[name, head]

    return get


def exported(run: tj.Run, folder: Path, model: torch.nn.Module) -> None:
    """Exports the run, and checks that transformers reads the same arrays and ids."""
    export_hf.main(["--run", str(run.path), str(folder)])
    back = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    for key, array in model.state_dict().items():
        np.testing.assert_array_equal(back[key], array)


@pytest.mark.parametrize("name", rest_slow(MAKERS.keys(), 2))
def test_masks(imported, name, tmp_path):
    folder, run, model = imported(name, "ForMaskedLM")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours, mask = run.tokenizers.target, theirs.mask_token
    texts = [f"the {mask} sat on the mat", f"{mask} and a {mask}", f"der Hund und die {mask} and the dog sat"]
    for text in TEXTS + texts:
        assert ours.special.wrap_text(ours.encode(text)) == theirs(text)["input_ids"], text
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=theirs, top_k=3)
    size = len(theirs)
    for text, fills in zip(texts, run.fill_mask(texts, top=3), strict=True):
        with torch.no_grad():
            ids = theirs(text, return_tensors="pt")["input_ids"]
            p = model(input_ids=ids).logits[0, ids[0] == theirs.mask_token_id].softmax(-1)[:, :size]
        best = p.topk(3)
        for rank, fill in enumerate(fills):
            assert fill.tokens == tuple(theirs.decode([i]) for i in best.indices[:, rank])
            assert abs(fill.probability / float(best.values[:, rank].prod()) - 1) < 1e-4
            if text.count(mask) == 1 and size == model.config.vocab_size:
                assert fill.text == pipeline(text)[rank]["sequence"]
    exported(run, tmp_path / "out", model)


@pytest.mark.parametrize("name", rest_slow(MAKERS.keys(), 2))
def test_labels_and_embeddings(imported, name, tmp_path):
    folder, run, model = imported(name, "ForSequenceClassification")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = theirs(TEXTS[:4], return_tensors="pt", padding=True)
    with torch.no_grad():
        scores = model(**inputs).logits
    probabilities = scores.softmax(-1).numpy()
    kind, ours = PUBLISHED[name]["model_type"], np.concatenate(run.logits(TEXTS[:4]))
    pair = f"whole model: {name}", f"transformers {type(model).__name__}"
    family_table.record_logits(name, folder, kind, ours.reshape(scores.shape), scores.numpy(), pair)
    with torch.no_grad():
        states = model.base_model(**inputs).last_hidden_state
    for row, (label, probability) in zip(probabilities, run.classify(TEXTS[:4]), strict=True):
        assert label == LABELS[str(row.argmax())]
        assert abs(probability - row.max()) < 1e-5
    real = inputs["attention_mask"][..., None]
    assert_close(run.embed(TEXTS[:4]), ((states * real).sum(1) / real.sum(1)).numpy(), 1e-5)
    exported(run, tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == LABELS
    rows = [row[mask == 1].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    actual = family_table.equal_states(run, tmp_path / "out", rows, states.numpy())
    family_table.record(name, outputs="labels, masks", export="arrays", ctranslate2=actual)


@pytest.mark.parametrize("name", rest_slow(MAKERS.keys(), 1))
def test_a_classifier_starts_from_a_masked_language_model(imported, name, tmp_path):
    """Also a base model alone is exported as a classifier, with a random head that has all of its layers."""
    folder, masked, model = imported(name, "ForMaskedLM")
    prefix = f"{model.base_model_prefix}."
    arrays = load_file(folder / "model.safetensors")
    base = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
    save_file(base, tmp_path / "model.safetensors")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    import_hf.main([str(tmp_path), "--run", str(tmp_path / "run"), "--family", "classifier"])
    run = tj.load(tmp_path / "run")
    np.testing.assert_array_equal(run.embed(TEXTS[:3]), masked.embed(TEXTS[:3]))
    export_hf.main(["--run", str(run.path), str(tmp_path / "out")])
    loader = transformers.AutoModelForSequenceClassification
    assert not any(loader.from_pretrained(tmp_path / "out", output_loading_info=True)[1].values())
    empty = jax.tree.map(jnp.zeros_like, run.params)
    loaded, report = load_into(empty, run.config.model, masked.path)
    assert all(key.startswith(("head/", "pooler/")) for key in report.new)
    assert find_mismatches(run.config.train, run.config.model, run.tokenizers, masked.path) == []
    np.testing.assert_array_equal(loaded["embedding"]["embedding"], masked.params["embedding"]["embedding"])


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_fields_of_other_heads_are_written_again(head, tmp_path):
    """Those that transformers reads when it puts another head on the model."""
    name, dropout = "answerdotai/ModernBERT-base", {"classifier_dropout": 0.3, "decoder_bias": head != "ForMaskedLM"}
    (folder := tmp_path / "checkpoint").mkdir()
    make(folder, name, head, classifier_pooling="mean", **dropout)
    import_hf.main([str(folder), "--run", str(tmp_path / "run")])
    export_hf.main(["--run", str(tmp_path / "run"), str(tmp_path / "out"), "--no-check"])
    theirs, ours = (transformers.AutoConfig.from_pretrained(place) for place in (folder, tmp_path / "out"))
    for field in ("cls_token_id", "sep_token_id", "classifier_pooling", "decoder_bias", "classifier_dropout"):
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize("name", rest_slow(MAKERS.keys(), 1))
def test_folders_of_sentence_transformers(imported, name, tmp_path):
    """A base model that cuts texts at the length of its tokenizer."""
    source, _, _ = imported(name, "ForMaskedLM")
    folder = test_sentence.sentence_folder(source, tmp_path / "copy", mode="cls", prompts={"prompts": {"q": "der "}})
    base = transformers.AutoModel.from_pretrained(source)
    base.save_pretrained(folder)
    config = json.loads((source / "config.json").read_text()) | {"architectures": [type(base).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    own = f"sentence_{PUBLISHED[name]['model_type']}_config.json"
    if own in sentence_transformers.SETTINGS:
        (folder / "sentence_bert_config.json").rename(folder / own)
    run = test_sentence.imported_run(folder, tmp_path)
    assert (run.config.embed.prompts, run.config.embed.max_length) == (("q=der ",), 9)
    expected = test_sentence.expected_embeddings(folder, test_sentence.TEXTS, "cls", normalize=True)
    assert_close(test_sentence.truncated(run), expected, 1e-5)


@pytest.mark.parametrize("name", ["FacebookAI/xlm-roberta-base", "distilbert/distilbert-base-uncased"])
def test_ids_by_the_files_that_transformers_writes(name, tmp_path):
    config = PUBLISHED[name] | MAKERS[name](tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    for folder in (tmp_path, tmp_path / "saved"):
        ours = load_checkpoint_tokenizers(folder).target
        for text in [*TEXTS, f"the {theirs.mask_token} sat, \u2161 \u00c4\u00e9"]:
            assert ours.special.wrap_text(ours.encode(text)) == theirs(text)["input_ids"], text
