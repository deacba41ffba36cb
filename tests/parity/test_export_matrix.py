"""Own runs of every architecture and tokenizer are exported and imported with equal ids, logits and outputs."""

import numpy as np
import pytest
import torch
import transformers

import tformer_jax as tj
from tests.helpers import assert_close, rest_slow
from tests.parity import own_runs
from tformer_jax.cli import export_checks, export_hf, import_hf
from tformer_jax.config import DecodeConfig

PADDED = 5
"""Rows of each model that its tokenizer does not have."""
PROMPTS = ["the cat", " Hund, 12  Ωμ", "on the mat sat 漢"]
SEARCHES = {"greedy": {}, "beam": {"num_beams": 3, "length_penalty": 0.6, "early_stopping": False}}
OURS = {"greedy": {"strategy": "greedy"}, "beam": {"beams": 3, "length_alpha": 0.6, "early_stopping": "heuristic"}}
FAST = [("llama", "bpe"), ("bart", "unigram")]
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in FAST else pytest.mark.slow)
    for name in own_runs.MODELS
    for kind in ("bpe", "unigram", "wordpiece", "bytes")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_out_and_in_again(name, kind, tmp_path):
    run, out, again = tmp_path / "run", tmp_path / "out", tmp_path / "again"
    own_runs.make(run, name, kind, padded=PADDED, decode=DecodeConfig(max_new_tokens=8))
    export_hf.main(["--run", str(run), "--model-type", name.split(" ")[0], str(out), "--no-check"])
    import_hf.main([str(out), "--run", str(again)])
    ours, reread = tj.load(run), tj.load(again)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model_class = getattr(transformers, export_checks.CLASSES[ours.config.model.family])
    theirs = model_class.from_pretrained(out, attn_implementation="eager").eval()

    pair = ours.config.model.family == "seq2seq"
    for text in PROMPTS:
        for loaded in (ours, reread):
            special, ids = loaded.tokenizers.source.special, loaded.tokenizers.source.encode(text)
            assert tokenizer(text)["input_ids"] == (special.wrap_side(ids) if pair else special.wrap_text(ids))

    batch = random_batch(ours)
    names = {"source": "input_ids", "tokens": "input_ids", "target_in": "decoder_input_ids"}
    inputs = {names[key]: torch.tensor(rows, dtype=torch.long) for key, rows in batch.items()}
    with torch.no_grad():
        expected = theirs(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits.numpy()
    assert_close(export_checks.logits(ours, batch), expected, 1e-5)
    np.testing.assert_array_equal(export_checks.logits(reread, batch), export_checks.logits(ours, batch))

    if ours.config.model.family in ("seq2seq", "decoder_lm"):
        for search, settings in SEARCHES.items():
            wanted = [their_output(tokenizer, theirs, text, settings, pair=pair) for text in PROMPTS]
            for loaded in (ours, reread):
                method = loaded.translate if pair else loaded.generate
                assert method(PROMPTS, **OURS[search], unknown="omit") == wanted, search  # as transformers decodes
            assert len(set(wanted)) > 1 or name in ("bart", "marian")  # of random post-norm decoders, all are equal


def random_batch(run: tj.Run) -> dict[str, np.ndarray]:
    """Returns rows of random ids, also of those that the tokenizer does not have."""
    keys = {"seq2seq": ("source", "target_in")}.get(run.config.model.family, ("tokens",))
    draw = np.random.default_rng(3)
    return {key: draw.integers(0, run.config.model.vocab_size, (3, 12), np.int32) for key in keys}


def their_output(tokenizer, model, text: str, settings: dict, *, pair: bool) -> str:
    """Returns what `generate` writes by the folder's generation_config.json; a continuation without its prompt."""
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        ids = model.generate(**inputs, **settings)[0]
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    prompt = "" if pair else tokenizer.decode(inputs["input_ids"][0], **options)
    return tokenizer.decode(ids, **options)[len(prompt) :]


LENGTHS = {"the model's": {}, "one token": {"max_new_tokens": 1}, "more than the model's": {"max_new_tokens": 99}}
UNLIMITED = [("gpt2", "the model's"), ("bart", "the model's"), ("bart", "more than the model's")]
UNLIMITED += [(name, length) for name in ("gpt2", "bart", "llama", "t5", "marian", "gemma2") for length in LENGTHS]


@pytest.mark.parametrize("case", rest_slow(list(dict.fromkeys(UNLIMITED)), 3))
def test_generate_works_by_the_settings_of_the_folder(case, tmp_path):
    """Outputs are as long as both allow: up to the positions of the model, or the limit of the run."""
    (name, length), run, out = case, tmp_path / "run", tmp_path / "out"
    own_runs.make(run, name, decode=DecodeConfig(**LENGTHS[length], unknown="omit"), max_length=16)
    export_hf.main(["--run", str(run), "--model-type", name, str(out), "--no-check"])
    ours, tokenizer = tj.load(run), transformers.AutoTokenizer.from_pretrained(out)
    pair = ours.config.model.family == "seq2seq"
    model_class = getattr(transformers, export_checks.CLASSES[ours.config.model.family])
    theirs = model_class.from_pretrained(out, attn_implementation="eager").eval()
    wanted = [their_output(tokenizer, theirs, text, {}, pair=pair) for text in PROMPTS]
    assert (ours.translate if pair else ours.generate)(PROMPTS) == wanted
