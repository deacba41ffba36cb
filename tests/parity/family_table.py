"""What the tests of published families find, for the table in `tformer_jax/README.md`, and CTranslate2's outputs."""

from pathlib import Path

import numpy as np
import pytest
import transformers

import tformer_jax as tj
from tests import helpers
from tformer_jax.cli import export_hf

FOUND: dict[str, dict[str, str | float]] = {}
"""Columns by the name of a checkpoint; `tests.programs.families` writes them."""
FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("sentencepiece.model", "tokenizer.model", "source.spm", "target.spm"),
)
NONE, FAILS = "no converter", "converter fails"


def record(name: str, **columns: str | float) -> None:
    """Adds columns of a checkpoint to the table."""
    FOUND.setdefault(name, {}).update(columns)


def record_logits(name: str, folder: Path, model_type: str, ours, theirs, proves: tuple[str, str]) -> None:
    """Compares logits, and records their difference beside the architecture and the tokenizer's files."""
    helpers.assert_close(ours, theirs, 1e-5, proves=proves)
    files = ", ".join(f"`{file}`" for file in FILES if (folder / file).is_file())
    record(name, architecture=model_type, tokenizer=files, logits=helpers.EQUIVALENCES[proves])


def converted(run: Path, folder: Path) -> str:
    """Exports a run and converts it for CTranslate2; returns the folder, `NONE` or `FAILS`."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    if not (folder / "config.json").is_file():
        export_hf.main(["--run", str(run), str(folder)])
    try:
        return ctranslate2.converters.TransformersConverter(str(folder)).convert(str(folder / "converted"), force=True)
    except ValueError as error:
        if "No conversion is registered" in str(error):
            return NONE
        raise
    except KeyError:  # Phi-3's reads a field that transformers 5 no longer has
        return FAILS


def equal_searches(run: tj.Run, folder: Path, texts: list[str], new: int) -> str:
    """Returns for which searches CTranslate2 writes the same as a run, given its export."""
    import ctranslate2

    model = converted(run.path, folder)
    if model in (NONE, FAILS):
        return model
    tokenizer, pair = transformers.AutoTokenizer.from_pretrained(folder), run.config.model.family == "seq2seq"
    inputs = [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) for text in texts]
    absent = run.config.model.vocab_size - len(tokenizer)
    never = {"suppress_sequences": [[f"<extra_id_{i}>"] for i in range(absent)], "length_penalty": 1.0}
    forced = tokenizer.convert_ids_to_tokens(list(run.tokenizers.target.special.forced))
    ends = [tokenizer.convert_ids_to_tokens(i) for i in run.tokenizers.target.special.eos]
    equal = []
    for search, beams in (("greedy", 1), ("beams", 3)):
        settings = {"beams": beams, "length_alpha": 1.0, "early_stopping": "first"} if beams > 1 else {}
        settings |= {"max_new_tokens": new, "unknown": "omit"} | ({} if settings else {"strategy": "greedy"})
        if pair:
            options = {"target_prefix": [forced] * len(texts)} if forced else {}
            actual = ctranslate2.Translator(model).translate_batch(
                inputs, beam_size=beams, max_decoding_length=new, **options, **never
            )
            rows, ours = [result.hypotheses[0] for result in actual], run.translate(texts, **settings)
        else:
            options = {"sampling_topk": 1, "include_prompt_in_result": False, "end_token": ends}
            actual = ctranslate2.Generator(model).generate_batch(
                inputs, max_length=new, beam_size=beams, **options, **never
            )
            rows = [row + result.sequences[0] for row, result in zip(inputs, actual, strict=True)]
            ours = [text + more for text, more in zip(texts, run.generate(texts, **settings), strict=True)]
        ids = [tokenizer.convert_tokens_to_ids(row) for row in rows]
        theirs = [tokenizer.decode(i, skip_special_tokens=True, clean_up_tokenization_spaces=False) for i in ids]
        equal += [search] * (theirs == ours)
    return ", ".join(equal) or "differs"


def equal_states(run: tj.Run, folder: Path, rows: list[list[int]], states: np.ndarray) -> str:
    """Returns whether the states of CTranslate2's encoder are those of transformers, [B, T, D], at tokens."""
    import ctranslate2

    model = converted(run.path, folder)
    if model in (NONE, FAILS):
        return model
    actual = np.array(ctranslate2.Encoder(model).forward_batch(rows).last_hidden_state)
    difference = max(
        np.abs(a[: len(row)] - b[: len(row)]).max() for row, a, b in zip(rows, actual, states, strict=True)
    )
    return "states" if difference < 1e-4 else "differs"
