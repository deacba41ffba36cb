"""The systems that `scripts/benchmark.py decode` compares: this library, Hugging Face on PyTorch, CTranslate2.

Each decodes the same rows with the same weights. The measured time excludes the conversion of inputs and outputs.
"""

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tformer_jax.config import Config, DataConfig, DecodeConfig, EvalConfig
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.inference.batching import pad_rows, power_of_two, run_in_batches
from tformer_jax.inference.layout import decoding_layout
from tformer_jax.inference.outputs import Output, RowDecoder
from tformer_jax.inference.requests import EncodedRequest
from tformer_jax.lab.benchmarks.jitted_loop import row_keys, translate
from tformer_jax.lab.benchmarks.turns import time_second_call
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.special_tokens import EOS, PAD, PAD_TOKEN, SPECIAL_TOKENS, UNK

Rows = Sequence[Sequence[int]]
TRIALS = 3
"""Number of measurements of each use of CTranslate2's threads, before the benchmark."""


class System(Protocol):
    """A system that decodes rows of token ids."""

    packages: tuple[str, ...]
    """Names of the packages whose versions are recorded."""

    def prepare(self, rows: Rows, beams: int) -> Callable[[], Any]:
        """Returns the function to measure: decodes rows that end in EOS, greedily if `beams` is 1."""

    def tokens(self, output: Any) -> np.ndarray:
        """Converts the output of the prepared function to int [rows, length]."""


class Ours:
    """This library, through the decoder of `scripts/translate.py`."""

    packages: tuple[str, ...] = ("jax", "jaxlib")

    def __init__(self, model: Seq2Seq, params: Any, batch: int, length: int):
        self._model, self._params, self._length = model, params, length
        self._cfg = Config(model=model.cfg, data=DataConfig(bucket_lengths=(1,)), eval=EvalConfig(batch_size=batch))

    def prepare(self, rows: Rows, beams: int) -> Callable[[], list[list[Output]]]:
        strategy = "beam" if beams > 1 else "greedy"
        decode = DecodeConfig(strategy=strategy, beams=beams, max_new_tokens=self._length)
        cfg = dataclasses.replace(self._cfg, decode=decode)
        decoder = RowDecoder(cfg, self._model, self._params, Tokenizers(NumberTokenizer(), NumberTokenizer()))
        return lambda: decoder(list(map(EncodedRequest, rows)))

    def tokens(self, output: list[list[Output]]) -> np.ndarray:
        return pad_rows([NumberTokenizer().encode(best.text) for best, *_ in output], len(output), self._length)


class JittedLoop:
    """This library without its engine: one compiled loop per batch, over rows sorted by length."""

    packages: tuple[str, ...] = ("jax", "jaxlib")

    def __init__(self, model: Seq2Seq, params: Any, batch: int, length: int):
        self._model, self._params = decoding_layout(model, params)
        self._batch, self._length = batch, length

    def prepare(self, rows: Rows, beams: int) -> Callable[[], list[np.ndarray]]:
        strategy = "beam" if beams > 1 else "greedy"
        cfg = DecodeConfig(strategy=strategy, beams=beams, max_new_tokens=self._length)
        keys = row_keys(0, np.arange(min(self._batch, power_of_two(len(rows)))))

        def run(indices: np.ndarray, T: int) -> np.ndarray:
            tokens = pad_rows([rows[index] for index in indices], len(indices), T)
            outputs = translate(self._model, self._params, tokens, keys, length=self._length, cfg=cfg)
            return np.asarray(outputs)

        longest = self._model.cfg.max_length
        return lambda: list(run_in_batches(list(map(len, rows)), run, size=self._batch, max_length=longest))

    def tokens(self, output: list[np.ndarray]) -> np.ndarray:
        return np.stack(output)


class NumberTokenizer(Tokenizer):
    """A tokenizer whose texts are token ids in decimal."""

    vocab_size = 2**31 - 1

    def encode_normalized(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(number) for number in text.split()] for text in texts]

    def decode_ordinary(self, ids: Sequence[int], unknown: str) -> str:
        return "".join(f" {number}" for number in ids)


class HuggingFace:
    """`MarianMTModel.generate` in PyTorch, over rows sorted by length."""

    packages: tuple[str, ...] = ("torch", "transformers")

    def __init__(self, folder: Path, batch: int, length: int, threads: int):
        import torch

        torch.set_num_threads(threads)
        self._model = _marian(folder)
        self._batch, self._length = batch, length

    def prepare(self, rows: Rows, beams: int) -> Callable[[], list[tuple[list[int], Any]]]:
        import torch

        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        batches = []
        for start in range(0, len(order), self._batch):
            indices = order[start : start + self._batch]
            padded = pad_rows([rows[index] for index in indices], len(indices), len(rows[indices[-1]]))
            batches.append((indices, torch.tensor(padded, dtype=torch.long)))
        settings = {"num_beams": beams, "do_sample": False, "max_new_tokens": self._length, "use_cache": True}
        generate = functools.partial(self._model.generate, **settings, forced_eos_token_id=None)

        def run() -> list[tuple[list[int], Any]]:
            return [
                (indices, generate(input_ids=source.clamp(min=0), attention_mask=(source != PAD).long()))
                for indices, source in batches
            ]

        return run

    def tokens(self, output: list[tuple[list[int], Any]]) -> np.ndarray:
        by_index = {
            index: row[1:] for indices, rows in output for index, row in zip(indices, rows.numpy(), strict=True)
        }
        return pad_rows([by_index[index] for index in range(len(by_index))], len(by_index), self._length)


class CTranslate2:
    """`ctranslate2.Translator` on the CPU in float32, with the faster of two uses of its threads.

    All threads share each batch, or each decodes batches of its own, as the engines of this library do. Rows are sorted
    by length.
    """

    packages: tuple[str, ...] = ("ctranslate2",)

    def __init__(self, folder: Path, batch: int, length: int, threads: int):
        import ctranslate2

        self._length = length
        with tempfile.TemporaryDirectory() as scratch:
            self._names = _convert(folder, Path(scratch) / "model")
            self._translators = {
                -(-batch // parts): ctranslate2.Translator(
                    str(Path(scratch) / "model"),
                    device="cpu",
                    compute_type="float32",
                    inter_threads=parts,
                    intra_threads=threads // parts,
                )
                for parts in {1, min(threads, batch)}
            }
        self._ids = {name: index for index, name in enumerate(self._names)}

    def prepare(self, rows: Rows, beams: int) -> Callable[[], list[Any]]:
        named = [[self._names[token] for token in row] for row in rows]
        runs = [
            functools.partial(
                translator.translate_batch,
                named,
                beam_size=beams,
                max_batch_size=size,
                max_decoding_length=self._length,
            )
            for size, translator in self._translators.items()
        ]
        return min(runs, key=lambda run: statistics.median(time_second_call(run)() for _ in range(TRIALS)))

    def tokens(self, output: list[Any]) -> np.ndarray:
        rows = [[self._ids[name] for name in result.hypotheses[0]] for result in output]
        return pad_rows(rows, len(rows), self._length)


def _marian(folder: Path) -> Any:
    from transformers import MarianMTModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    return MarianMTModel.from_pretrained(folder).eval()


def _convert(folder: Path, output: Path) -> list[str]:
    """Converts a Hugging Face Marian checkpoint to CTranslate2's format and returns the names of its tokens.

    Marian's last token is padding, which the converter removes.
    """
    import torch
    from ctranslate2.converters.transformers import MarianMTLoader

    model = _marian(folder)
    numbers = range(len(SPECIAL_TOKENS), model.config.vocab_size - 1)
    names = ["<nothing>", *SPECIAL_TOKENS[1:], *map(str, numbers), SPECIAL_TOKENS[PAD_TOKEN]]
    with torch.no_grad():
        spec = MarianMTLoader()(model, _Vocabulary(names))
    spec.validate()
    spec.optimize(quantization="float32")
    output.mkdir()
    spec.save(str(output))
    return names


class _Vocabulary:
    """The part of a Hugging Face tokenizer that the converter uses."""

    eos_token, unk_token = SPECIAL_TOKENS[EOS], SPECIAL_TOKENS[UNK]

    def __init__(self, names: list[str]):
        self._names = names

    def get_vocab(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._names)}


PEERS: dict[str, tuple[type[HuggingFace] | type[CTranslate2], tuple[str, ...]]] = {
    "Hugging Face": (HuggingFace, ("safetensors", "torch", "transformers")),
    "CTranslate2": (CTranslate2, ("safetensors", "torch", "transformers", "ctranslate2")),
}
"""Systems to compare with, and the modules that each requires."""


def versions(system: System) -> dict[str, str]:
    """Returns the versions of a system's packages."""
    return {name: metadata.version(name) for name in system.packages}
