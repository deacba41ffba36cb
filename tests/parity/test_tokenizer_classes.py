"""A tokenizer.json is read as the class that transformers takes for each architecture, whatever its own parts are."""

import json

import pytest
import sentencepiece
import tokenizers as hf
import transformers

from tests.parity import checkpoints, multilingual
from tformer_jax.base.errors import UserError
from tformer_jax.data.tokenizers import classes
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.interop.files import TEXT_MODELS
from tformer_jax.interop.hf import ARCHITECTURES

KINDS = (
    *("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "stablelm"),
    *("gemma2", "gemma3_text", "bart", "roberta", "modernbert"),
)
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "GemmaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"),
    "RobertaTokenizer",
)
MODELS = {
    "bytes": (hf.models.BPE(), hf.pre_tokenizers.ByteLevel()),
    "characters": (hf.models.BPE(), hf.pre_tokenizers.Metaspace()),
    "unigram": (hf.models.Unigram([("a", 0.0)]), hf.pre_tokenizers.Metaspace()),
    "wordpiece": (hf.models.WordPiece({"a": 0}), hf.pre_tokenizers.BertPreTokenizer()),
}
READ_AS_THEY_ARE = ("TokenizersBackend", "MarianTokenizer", "M2M100Tokenizer")
TEXTS = ("the cat sat", " the  cat\n on", "a</s> <s>cat", "Ω cat <think>x")
SPECIAL = ["<pad>", "</s>", "<s>", "<unk>", "<|endoftext|>"]


def as_gemma() -> hf.Tokenizer:
    tokenizer = hf.Tokenizer(hf.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = hf.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = hf.decoders.Sequence([hf.decoders.Replace("▁", " "), hf.decoders.Fuse()])
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = hf.trainers.BpeTrainer(vocab_size=60, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(checkpoints.TEXTS, trainer)
    tokenizer.post_processor = hf.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return tokenizer


@pytest.fixture(scope="module")
def written():
    bpe, trainer = hf.models.BPE, hf.trainers.BpeTrainer
    made = {
        "bytes": checkpoints.trained(bpe(), trainer, SPECIAL, metaspace=False),
        "words": checkpoints.trained(bpe(unk_token="<unk>"), trainer, SPECIAL, metaspace=True),
        "gemma": as_gemma(),
    }
    return {name: tokenizer.to_str() for name, tokenizer in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_class_of_every_model_type(model, tmp_path, monkeypatch):
    """Of each type that is imported: the class that AutoTokenizer calls, which declared classes decide, or not."""
    read = classmethod(lambda kind, *_, **__: kind.__name__)
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "from_pretrained", read)
    tokenizer = hf.Tokenizer(MODELS[model][0])
    tokenizer.pre_tokenizer = MODELS[model][1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    code = {"auto_map": {"AutoTokenizer": ["code.Own", None]}}
    declared = [{}, *({"tokenizer_class": name} for name in filter(None, CLASSES)), {"auto_map": {"Other": "a"}}]
    declared += [{"tokenizer_class": name} | code for name in ("GPT2Tokenizer", "Qwen2Tokenizer")]
    for kind in {*ARCHITECTURES, *TEXT_MODELS}:
        config = transformers.AutoConfig.for_model(kind)
        for options in declared:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, config=config).replace("DistilBert", "Bert")
            assert theirs in {*classes.BUILDERS, *READ_AS_THEY_ARE}, (kind, options)
            if theirs in READ_AS_THEY_ARE or isinstance(tokenizer.model, classes.MODELS.get(theirs, hf.models.BPE)):
                expected = theirs if theirs in classes.BUILDERS else ""
                assert classes.rebuilding_class(tokenizer, kind, options) == expected, (kind, options)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5", "qwen3_5_text", "phi3", "granite"])
def test_words_of_letters_marks_and_digits(kind, tmp_path):
    """Of a BPE whose merges join what patterns split: numbers, and letters with their vowel signs."""
    texts, space = ["हिन्दी 2023 में", "ไทยที่ 2023"] * 9, hf.pre_tokenizers
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = space.Sequence([space.Split(" ", "isolated"), space.ByteLevel(use_regex=False)])
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 330, "special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, hf.trainers.BpeTrainer(**options))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "eos_token_id": 1, "bos_token_id": 2}))
    rows = set()
    for declared in (None, "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared} if declared else {}))
        theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_checkpoint_tokenizers(tmp_path).target
        assert [ours.encode(text) for text in texts] == theirs(texts, add_special_tokens=False)["input_ids"], declared
        rows.add(len(ours.encode(texts[0])))
    assert len(rows) == (4 if kind == "qwen3_5_text" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_for_each_class(written, kind, tmp_path):
    pair = kind == "bart"
    ids = {"eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "is_encoder_decoder": pair, **ids}))
    for name, text in written.items():
        (tmp_path / "tokenizer.json").write_text(text)
        for declared in CLASSES:
            options = {} if declared is None else {"tokenizer_class": declared}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            ours = load_checkpoint_tokenizers(tmp_path).target
            assert ours.vocab_size == len(theirs), (name, declared)
            for sentence in TEXTS:
                actual = [*ours.special.before, *ours.encode(sentence), *ours.special.after]
                assert actual == theirs(sentence)["input_ids"], (name, declared, sentence)


def test_nllb_with_its_sentencepiece_model_alone(tmp_path):
    """Pieces are those of SentencePiece itself, whose ids fairseq moves by one; ids and texts those of transformers."""
    names = [f"{word} {word[::-1]}" for word in {*" ".join(TEXTS[:2]).split(), "ünter", "Straße", "catalog", "attic"}]
    model = multilingual.pieces(model_type="bpe", vocab_size=90)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m2m_100", "decoder_start_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NllbTokenizer"}))
    with pytest.raises(UserError, match="has no tokenizer.json, and no additional_special_tokens, the tags of lang"):
        load_checkpoint_tokenizers(tmp_path)
    options = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": multilingual.NLLB}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    ours, theirs = load_checkpoint_tokenizers(tmp_path).target, transformers.AutoTokenizer.from_pretrained(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.vocab_size == len(theirs) == processor.get_piece_size() + 1 + len(multilingual.NLLB) + 1
    for text in (*checkpoints.TEXTS[:4], "the  cathedral on catalogs", "und das Haus", *names):
        expected = [i + 1 if i else 3 for i in processor.encode(text)]
        assert ours.encode(text) == expected == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    first = processor.get_piece_size() + 1  # as published; transformers 5 puts <mask> first if no ids are declared
    assert [ours.id_of(name) for name in (*multilingual.NLLB, "<mask>")] == [*range(first, first + 6)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("albert", {}),
        ("albert", {"do_lower_case": False, "keep_accents": True}),
        *((kind, {"add_prefix_space": spaced}) for kind in ("albert", "xlm-roberta") for spaced in (False, True)),
    ],
)
def test_a_unigram_with_other_parts_in_its_file(kind, options, tmp_path):
    roberta = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    special = roberta if kind == "xlm-roberta" else ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = hf.Tokenizer(hf.models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.normalizer = hf.pre_tokenizers.Metaspace(), hf.normalizers.NFKC()
    texts = [*checkpoints.TEXTS, "Saßen \"Mät\" ``a cat'' 2023"]
    trainer = hf.trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "bos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_checkpoint_tokenizers(tmp_path).target
    for text in (*TEXTS, "``Mät''  THE cat", f"a {special[-1]} on"):
        ids = ours.encode(text)
        assert [*ours.special.before, *ids, *ours.special.after] == theirs(text)["input_ids"]
        if not {*ids} & {*ours.special.eos}:
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_language_models_begin_with_bos_and_t5_ends_with_eos(tmp_path):
    """Regression test: with a SentencePiece model alone, prompts of some language models ended with EOS."""
    (tmp_path / "tokenizer.model").write_bytes(multilingual.pieces(model_type="bpe"))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for kind in ("llama", "gemma", "gemma3", "phi3", "ministral", "t5gemma", "t5"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | ids))
        special = load_checkpoint_tokenizers(tmp_path).target.special
        assert (special.before, special.after) == (((), (2,)) if kind == "t5" else ((1,), ())), kind


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("bert", "XLMRobertaTokenizer"), ("roberta", "XLMRobertaTokenizerFast"), ("bart", "T5Tokenizer")],
)
def test_a_sentencepiece_model_is_read_as_the_class_that_is_named(model_type, kind, tmp_path):
    """Small multilingual encoders are BERTs with the tokenizer of XLM-R."""
    (tmp_path / "tokenizer.model").write_bytes(multilingual.pieces(model_type="unigram"))
    (tmp_path / "sentencepiece.bpe.model").write_bytes(multilingual.pieces(model_type="unigram"))
    (tmp_path / "spiece.model").write_bytes(multilingual.pieces(model_type="unigram"))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | ids))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} if kind else {}))
    ours = load_checkpoint_tokenizers(tmp_path).target
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat sat", "und das Haus"):
        assert [*ours.special.before, *ours.encode(text), *ours.special.after] == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("file", "kind"), [("vocab.txt", "BertJapaneseTokenizer"), ("tokenizer.model", "XLNetTokenizer")]
)
@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_files_of_other_classes_are_refused(file, kind, place, tmp_path):
    checkpoints.word_pieces(tmp_path)
    (tmp_path / file).touch()
    if file != "vocab.txt":
        (tmp_path / "vocab.txt").unlink()
        (tmp_path / file).write_bytes(multilingual.pieces(model_type="bpe"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "eos_token_id": 2}))
    fields = json.loads((tmp_path / place).read_text()) if (tmp_path / place).is_file() else {}
    (tmp_path / place).write_text(json.dumps(fields | {"tokenizer_class": kind}))
    with pytest.raises(UserError, match=rf"has only .*, which is not read for {kind}: save .*tokenizer.json"):
        load_checkpoint_tokenizers(tmp_path)


@pytest.mark.parametrize("kind", ["ElectraTokenizer", "MobileBertTokenizer", "LayoutLMTokenizerFast"])
def test_classes_that_build_the_tokenizer_of_bert(kind, tmp_path):
    """The case of letters is that of the options, not of the file."""
    tokenizer = hf.Tokenizer(hf.models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "Cat": 3}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = hf.normalizers.Lowercase(), hf.pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "eos_token_id": 2, "bos_token_id": 1}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "do_lower_case": False}))
    ours, theirs = load_checkpoint_tokenizers(tmp_path).target, transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [*ours.special.before, *ours.encode("Cat"), *ours.special.after] == theirs("Cat")["input_ids"] == [1, 3, 2]
