"""Reads an exported folder with transformers and CTranslate2, if they are installed, and compares it with its run."""

import contextlib
import dataclasses
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tformer_jax as tj
from tformer_jax.base.checks import not_installed
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.json_files import read_json
from tformer_jax.data.tokenizers import Tokenizer
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.models import registry
from tformer_jax.parallel.placement import mesh_of, shard_batch, use_whole_mesh

TEXTS = ("The cat sat on the mat.", " two  spaces\tand\nlines ", "Füße, 漢字 123 456.78 isn't", "")
"""Texts whose ids are compared."""
ROWS, LENGTH = 2, 32
"""Size of the batch of random tokens whose logits are compared."""
TOLERANCE = 1e-4
"""Largest difference of logits in float32, relative to the largest logit."""
SCORE_TOLERANCE = 1e-3
"""Largest difference of log-probabilities of tokens by CTranslate2, in nats."""
CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "decoder_lm": "AutoModelForCausalLM",
    "classifier": "AutoModelForSequenceClassification",
    "masked_lm": "AutoModelForMaskedLM",
}
"""Classes of transformers that load the model of a family."""


class Difference(UserError):
    """Another library computes something else from the exported folder than the run does."""


@contextlib.contextmanager
def _failures_reported(problem: str) -> Iterator[None]:
    """Context in which an exception of a library, which may be any, becomes a `Difference` that names the problem."""
    try:
        yield
    except Difference:
        raise
    except Exception as error:
        raise Difference(f"{problem} ({first_line(error, 200)})") from error


def check_transformers(folder: Path, run: tj.Run, *, tokenizer: bool) -> str:
    """Compares ids, decoded texts and logits with transformers; returns the result as one sentence.

    Args:
        tokenizer: whether the folder has a tokenizer.

    Raises:
        Difference: they differ, or transformers cannot load the folder.
    """
    if missing := not_installed(["torch", "transformers"]):
        return f"not checked with transformers: {' and '.join(missing)} is not installed"
    name = f"transformers {metadata.version('transformers')}"
    with without_warnings(), _failures_reported(f"{name} cannot read the exported folder"):
        ids = _check_ids(folder, run) if tokenizer else ""
        difference = _check_logits(_load_theirs(folder, run), run)
    return f"checked with {name}: {ids}logits within {difference:.0e} of the largest (at most {TOLERANCE:.0e})"


def check_adapter(folder: Path, base: str, run: tj.Run) -> str:
    """Compares logits with PEFT on a base model; returns the result, or why it was not compared, as one sentence.

    Raises:
        Difference: they differ, or PEFT cannot load the adapter.
    """
    if missing := not_installed(["torch", "transformers", "peft"]):
        return f"not checked with PEFT: {' and '.join(missing)} is not installed"
    if not Path(base).is_dir():
        return f"not checked with PEFT: {base} is not a folder"
    import peft

    name = f"PEFT {peft.__version__}"
    try:
        with without_warnings(), _failures_reported(f"{name} cannot load the adapter"):
            adapted = peft.PeftModel.from_pretrained(_load_theirs(Path(base), run), str(folder)).eval()
            difference = _check_logits(adapted, run)
    except Difference as error:
        wanted = f"the checkpoint or an export of {run.config.train.start_from}, from which the run started"
        reason = f"the base {base} must be {wanted}"
        if rounded := run.config.train.lora_base:
            reason = f"train.lora_base={rounded!r} rounded the kernels of the base, which PEFT does not"
        raise Difference(f"{error}: {reason}") from error
    return f"checked with {name}: logits within {difference:.0e} (at most {TOLERANCE:.0e})"


def check_ctranslate2(folder: Path, run: tj.Run) -> str | None:
    """Converts the folder by CTranslate2's own program and compares log-probabilities; returns the result.

    None: CTranslate2 is not installed, or does not have the architecture or a use for the model.
    """
    if not_installed(["torch", "transformers", "ctranslate2"]) or not run.model.decodes:
        return None
    import ctranslate2

    name = f"CTranslate2 {ctranslate2.__version__}"
    problem = "cannot convert it"
    with tempfile.TemporaryDirectory() as place, without_warnings():
        try:
            ctranslate2.converters.TransformersConverter(str(folder)).convert(f"{place}/converted")
            problem = "converts it, but cannot score its tokens"
            difference = _score_difference(folder, Path(place, "converted"), run)
        except Exception as error:  # the library raises many types
            if "No conversion is registered" in str(error):
                return None
            return f"{name} {problem} ({first_line(error, 200)}); --format ctranslate2 writes its files instead"
    if difference > SCORE_TOLERANCE:
        return f"{name} converts it, but computes other log-probabilities (by {difference:.2g}): do not use the result"
    return f"checked with {name}: log-probabilities within {difference:.0e} (at most {SCORE_TOLERANCE:.0e})"


def check_converted(folder: Path, converted: Path, run: tj.Run, quantization: str | None) -> str:
    """Compares log-probabilities of CTranslate2 and of the run; returns the result as one sentence.

    Args:
        folder: the checkpoint folder that was converted.
        quantization: type of the converted weights; unless it is float32, log-probabilities may differ by any amount.

    Raises:
        Difference: they differ, or CTranslate2 cannot compute them.
    """
    name = f"CTranslate2 {metadata.version('ctranslate2')}"
    with _failures_reported(f"{name} cannot score the tokens of its model"):
        difference = _score_difference(folder, converted, run)
    if quantization not in (None, "float32"):
        return f"{name} with weights of {quantization}: log-probabilities within {difference:.2g} nats of the run's"
    if not difference <= SCORE_TOLERANCE:
        raise Difference(f"log-probabilities of {name} differ from the run's by {difference:.2g} nats")
    return f"checked with {name}: log-probabilities within {difference:.0e} (at most {SCORE_TOLERANCE:.0e})"


def _check_ids(folder: Path, run: tj.Run) -> str:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    pair = run.model.reads_source
    sides: dict[str, Tokenizer] = {"text": run.tokenizers.source}
    if pair and run.tokenizers.source.to_json() != run.tokenizers.target.to_json():
        sides["text_target"] = run.tokenizers.target
    if hasattr(type(theirs), "src_lang"):
        languages = languages_of(run.tokenizers.source)
        if theirs.src_lang in languages:
            _compare_ids(theirs, sides, [languages[theirs.src_lang]], pair=pair)
        theirs.src_lang, tag = next(iter(languages.items()))
        _compare_ids(theirs, sides, [tag], pair=pair)
    else:
        _compare_ids(theirs, sides, [], pair=pair)
    for text in TEXTS:
        ids = [i for i in run.tokenizers.target.encode(text) if i not in run.tokenizers.target.special.eos]
        written = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if written != (expected_text := run.tokenizers.target.decode(ids)):
            raise Difference(f"AutoTokenizer decodes {ids} to {written!r}, the run to {expected_text!r}")
    return "equal ids, "


def _compare_ids(theirs: Any, sides: dict[str, Tokenizer], tags: Sequence[int], *, pair: bool) -> None:
    """Raises `Difference` if AutoTokenizer reads a text otherwise than the run, whose sources have `tags`."""
    for side, ours in sides.items():
        for text in TEXTS:
            ids = ours.encode(text)
            expected = ours.special.wrap_side(ids, tags) if pair else ours.special.wrap_text(ids)
            if (computed := list(theirs(**{side: text})["input_ids"])) != expected:
                raise Difference(f"AutoTokenizer reads {text!r} as {computed}, the run as {expected}")


def _load_theirs(folder: Path, run: tj.Run) -> Any:
    """Returns the model of transformers in float32."""
    import torch
    import transformers

    model_class = getattr(transformers, CLASSES[run.config.model.family])
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _check_logits(theirs: Any, run: tj.Run) -> float:
    import torch

    batch = _random_batch(run)
    names = {"source": "input_ids", "tokens": "input_ids", "target_in": "decoder_input_ids"}
    inputs = {names[key]: torch.tensor(rows, dtype=torch.long) for key, rows in batch.items()}
    with torch.no_grad():
        expected = theirs(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits.numpy()
    computed = logits(run, batch)
    if computed.shape != expected.shape:
        raise Difference(f"transformers computes logits of the shape {expected.shape}, the run of {computed.shape}")
    difference = float(np.abs(computed - expected).max() / np.abs(expected).max())
    if not difference <= TOLERANCE:
        raise Difference(f"logits of transformers differ from the run's by {difference:.1e} of the largest one")
    return difference


def logits(run: tj.Run, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the logits of rows of ids, computed in float32 with the highest precision of the device."""
    model = registry.build(dataclasses.replace(run.config.model, dtype="float32"))
    mesh = mesh_of(run.params)
    with use_whole_mesh(mesh), jax.default_matmul_precision("highest"):
        arguments = run.model.arguments(shard_batch(mesh, batch))
        computed = jax.jit(lambda params: model.apply({"params": params}, **arguments))(run.params)
    return np.asarray(jax.device_get(computed), np.float32)


def _random_batch(run: tj.Run) -> dict[str, np.ndarray]:
    """Returns rows of random tokens that the tokenizers have, int32 [ROWS, T] by batch key; padding has no position."""
    cfg, rng = run.config.model, np.random.default_rng(0)
    T = min(cfg.max_length, LENGTH)
    size = min(run.tokenizers.source.vocab_size, run.tokenizers.target.vocab_size)
    rows = {key: rng.integers(0, size, (ROWS, T), np.int32) for key in cfg.model_class.inputs}
    special = run.tokenizers.target.special
    return {key: np.where(ids == special.pad, special.eos[0], ids).astype(np.int32) for key, ids in rows.items()}


def _score_difference(folder: Path, converted: Path, run: tj.Run) -> float:
    """Returns the largest difference of log-probabilities of the tokens of random rows, in nats."""
    import ctranslate2
    import transformers

    named = transformers.AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens
    batch = _random_batch(run)
    special = run.tokenizers.target.special
    if run.model.reads_source:
        ends = np.full((ROWS, 1), special.eos[0], np.int32)
        labels = np.concatenate((batch["target_in"][:, 1:], ends), axis=1)
        batch["target_in"][:, 0] = special.start
        start = read_json(converted / "config.json")["decoder_start_token"]
        first = 0 if start is None else 1  # the tag, which the caller of mBART names, is the start
        rows = {"source": batch["source"], "labels": batch["target_in"][:, first:]}
    else:
        labels, rows = batch["tokens"][:, 1:], {"tokens": batch["tokens"]}
    all_logits = logits(run, batch)
    log_p = jax.nn.log_softmax(all_logits[:, : labels.shape[1]], axis=-1)
    expected = np.take_along_axis(np.asarray(log_p), labels[..., None], axis=-1)[..., 0]
    words = {key: [named(row.tolist()) for row in ids] for key, ids in rows.items()}
    if run.model.reads_source:
        translator = ctranslate2.Translator(str(converted))
        scored = translator.score_batch(words["source"], words["labels"], max_input_length=0)
    else:
        scored = ctranslate2.Generator(str(converted)).score_batch(words["tokens"])
    return float(np.abs(np.array([result.log_probs for result in scored]) - expected).max())


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Context manager without warnings, and without the progress bars of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT calls what transformers has deprecated
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
