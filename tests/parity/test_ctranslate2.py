"""CTranslate2's own converter accepts exported checkpoints, and its outputs equal ours."""

import pytest
import transformers

import tformer_jax as tj
from tests.helpers import rest_slow
from tformer_jax.cli import export_hf

ctranslate2 = pytest.importorskip("ctranslate2")
TEXTS = ["the cat", "a dog and the", "der Hund und die Katze"]
NEW = 6


@pytest.fixture(scope="module")
def converted(imported, tmp_path_factory):
    """Returns a function that exports and converts the run of a kind, once."""
    made = {}

    def make(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            run = imported(kind)[1]
            export_hf.main(["--run", str(run), str(folder / "exported")])
            converter = ctranslate2.converters.TransformersConverter(str(folder / "exported"))
            converter.convert(str(folder / "converted"))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
            made[kind] = tj.load(run), tokenizer, str(folder / "converted")
        return made[kind]

    return make


CASES = [("marian", 3), ("gpt2", 1), ("marian", 1), ("t5", 3), ("t5", 1), ("llama", 1), ("llama", 3), ("gpt2", 3)]


@pytest.mark.parametrize("case", rest_slow(CASES, 2))
def test_outputs_are_equal(converted, case):
    kind, beams = case
    run, tokenizer, folder = converted(kind)
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in TEXTS]
    padding = run.config.model.vocab_size - len(tokenizer)  # rows that the converters name so, and we never generate
    never = {"suppress_sequences": [[f"<extra_id_{i}>"] for i in range(padding)]}
    settings = {"beams": beams, "max_new_tokens": NEW} if beams > 1 else {"strategy": "greedy", "max_new_tokens": NEW}
    if run.config.model.family == "seq2seq":
        found = ctranslate2.Translator(folder).translate_batch(
            inputs, beam_size=beams, max_decoding_length=NEW, **never
        )
        rows, ours = [result.hypotheses[0] for result in found], run.translate(TEXTS, **settings)
        expected = [decoded(tokenizer, row) for row in rows]
    else:
        ends = [tokenizer.convert_ids_to_tokens(i) for i in run.tokenizers.target.special.eos]
        search = {"beam_size": beams, "sampling_topk": 1, "include_prompt_in_result": False, "end_token": ends}
        found = ctranslate2.Generator(folder).generate_batch(inputs, max_length=NEW, **search, **never)
        whole = [decoded(tokenizer, row + result.sequences[0]) for row, result in zip(inputs, found, strict=True)]
        expected, ours = whole, [text + more for text, more in zip(TEXTS, run.generate(TEXTS, **settings), strict=True)]
    assert ours == expected
    assert len(set(ours)) > 1 or kind == "t5"


def decoded(tokenizer, tokens: list[str]) -> str:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
