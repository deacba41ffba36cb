"""A continuation has the text that transformers decodes after its prompt, with the space between them."""

import json

import pytest
import tokenizers as hf
import transformers

from tests.parity import checkpoints
from tests.parity.test_added_tokens import EXACT, LLAMA, T5, train, write
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.inference.detokenization import output_decoder

EXAMPLES = [("the", " dog sits on"), ("the dog", " sits"), ("the d", "og sits"), ("dog", " log on the")]
SPECIAL = ["<unk>", "<s>", "</s>"]
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LOSSLESS = [hf.decoders.Replace("▁", " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
DECODERS = {
    "metaspace": None,
    "lossless": hf.decoders.Sequence(LOSSLESS),
    "strip": hf.decoders.Sequence([*LOSSLESS, hf.decoders.Strip(" ", 1, 0)]),
}


def assert_equal(folder):
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_checkpoint_tokenizers(folder).target
    decoder, compared = output_decoder(ours, continues=True), 0
    for prompt, continuation in EXAMPLES:
        read, whole = theirs(prompt)["input_ids"], theirs(prompt + continuation)["input_ids"]
        ends = len(read) - len(ours.special.after)
        if whole[:ends] == read[:ends]:
            texts = [theirs.decode(ids, skip_special_tokens=True) for ids in (read[:ends], whole)]
            assert decoder.decode(whole[ends:]) == texts[1].removeprefix(texts[0])
            compared += 1
    assert compared > 1


@pytest.mark.parametrize("text", ["the dog sits on the log", "a dog sits on the log"])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_words_with_a_space_in_front(scheme, decoder, text, tmp_path):
    """Of the first text, the tokenizer knows no "a"."""
    tokenizer = hf.Tokenizer(hf.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = DECODERS[decoder] or hf.decoders.Metaspace(prepend_scheme=scheme)
    trainer = hf.trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([text] * 20, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ROLES))
    assert_equal(tmp_path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("spaced", [None, False, True])
def test_the_class_of_llama(legacy, spaced, tmp_path):
    checkpoints.llama(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    options = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_prefix_space": spaced}
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert_equal(tmp_path)


def test_bytes(tmp_path):
    tokenizer = checkpoints.trained(hf.models.BPE(), hf.trainers.BpeTrainer, SPECIAL, metaspace=False)
    checkpoints.save_tokenizer(tmp_path, tokenizer, **ROLES)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert_equal(tmp_path)
    assert load_checkpoint_tokenizers(tmp_path).target.special.context is None


@pytest.mark.parametrize("config", [LLAMA, T5])
def test_pieces_without_the_letter_a(config, tmp_path):
    kind = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 40} if config is T5 else EXACT
    write(tmp_path, train(["the dog sits on the log"] * 20, **kind), config, {})
    assert_equal(tmp_path)
