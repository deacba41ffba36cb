"""An exported run in transformers reads and writes what the run does."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

import tformer_jax as tj
from tformer_jax.data.characters import is_blank

if TYPE_CHECKING:
    from tests.programs.fuzz import Fuzz

IDS, OUTPUTS = 20, 500
"""transformers reads every twentieth text, and translates every five-hundredth."""


def compare(fuzz: "Fuzz", run: tj.Run, folder: Path, outputs: Sequence[str]) -> None:
    """Records differences of ids and of greedy outputs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = [run.tokenizers.source.special.eos[0]]
    for name, form in fuzz.texts.every(IDS).forms.items():
        expected = [[*ids, *end] for ids in run.tokenizers.source.encode_batch(form)]
        fuzz.findings.equal(f"transformers: ids of {name} texts", form, tokenizer(form)["input_ids"], expected)
        fuzz.findings.saw("transformers: ids", len(form))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    some = [pair for pair in list(zip(fuzz.texts.raw, outputs, strict=True))[::OUTPUTS] if not is_blank(pair[0])]
    texts, expected = [text for text, _ in some], [output for _, output in some]
    written = []
    for start in range(0, len(texts), 50):
        inputs = tokenizer(texts[start : start + 50], return_tensors="pt", padding=True)
        ids = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=run.config.decode.max_new_tokens)
        written += tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    fuzz.findings.equal("transformers: outputs", texts, written, expected)
    fuzz.findings.saw("transformers: outputs", len(texts))
