"""Writes a run as a checkpoint of Hugging Face or CTranslate2, or as an adapter, for `scripts/export_hf.py`."""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tformer_jax as tj
from tformer_jax import config
from tformer_jax.base.errors import UserError, first_line
from tformer_jax.base.paths import as_path, resolved
from tformer_jax.cli import export_checks, model_card
from tformer_jax.cli.common import format_size, load_run
from tformer_jax.config import ModelConfig
from tformer_jax.config.layers import QUANTIZATIONS
from tformer_jax.data.tokenizers import Tokenizers, same_tokens
from tformer_jax.data.tokenizers.exported import adds_tags, export_tokenizers, language_options, unspaced_symbol
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.interop import adapters, companions, ctranslate2_models, files, generation, hf, sentence_transformers
from tformer_jax.interop.architecture import label_fields
from tformer_jax.models import cost, registry
from tformer_jax.parallel.placement import mesh_of
from tformer_jax.runs import run_folder, vocabulary, weights
from tformer_jax.runs.trained import Trained, load_adapted


def save_run(options: argparse.Namespace) -> None:
    """Saves the model, the tokenizer and the decoding settings of the run `options.run` in `options.folder`.

    The folder appears only after all files are written and other libraries have read them as `options.check` says.

    Raises:
        UserError: no architecture, or not `options.model_type`, computes the same as the model, or transformers
            computes something else from the written files; or safetensors is not installed.
    """
    if options.format == "run":
        save_quantized(options)
        return
    hf.arrays_writer()  # raises before the run is loaded
    if options.format == "ctranslate2":
        ctranslate2_models.check_installed()
    run = load_run(options)
    if weights.are_quantized(run.path):
        raise UserError(f"{run.path} has kernels of int8: export the run from which it was made")
    origin, missing = _origin(run)
    folder, place = options.folder, resolved(options.folder)
    unfinished = place.with_name(f".{place.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    written = unfinished / options.format
    (unfinished / "huggingface").mkdir(parents=True)
    try:
        model_type, reports, notes = WRITERS[options.format](unfinished, options, run, origin)
        auto, name = export_checks.CLASSES[run.config.model.family], place.name
        given = {"kind": options.format, "license_name": options.license, "base": _base(options, origin)}
        given |= {"quantization": None if options.quantization == "float32" else options.quantization}
        adds = adds_tags(run.tokenizers.source, model_type)
        model_card.write(written, name, run, origin, auto=auto, adds_tags=adds, **given)
        written.replace(place)
    except export_checks.Difference as error:
        raise UserError(f"{error}; {folder} was not written (--no-check writes it)") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{folder}: {hf.architecture_of(model_type, run.config.model.family).name}")
    for line in reports:
        print(line)
    for note in (*missing, *notes):
        print(note, file=sys.stderr)


def save_quantized(options: argparse.Namespace) -> None:
    """Saves the run `options.run` as a run whose kernels of layers are stored as int8, and prints the sizes.

    Raises:
        UserError: the model does not support it, or qwix is not installed.
    """
    own = config.load(options.run / "config.json").model.quantization
    options.quantize = options.quantization or own or QUANTIZATIONS[0]
    run = load_run(options, needs_head=False)
    plain = registry.build(dataclasses.replace(run.config.model, quantization=None))
    sizes = {"before": cost.size_bytes(registry.shapes(plain)), "after": cost.size_bytes(run.params)}
    trained = Trained(run.config, run.model, run.params, run.tokenizers, run.labels)
    facts = {"quantization": options.quantize, "bytes": sizes}
    record = run_folder.QUANTIZED
    vocabulary.save(options.folder, run.path, trained, "quantized", facts, record, step=options.step)
    before, after = map(format_size, sizes.values())
    multiplied = " and multiplied in int8" if options.quantize == "int8" else ""
    print(f"{options.folder}: kernels of layers stored as int8{multiplied}; parameters {before} -> {after}")


NOT_CHECKED = "not checked: --no-check"
ONLY_HUGGINGFACE = ("config.json", "generation_config.json", "model.safetensors")
"""Files that a folder of CTranslate2 does not have, or has with other contents."""
Reports = tuple[str, list[str], list[str]]
"""The model type, what other libraries compute, and what the files do not hold."""


def _save_checkpoint(place: Path, options: argparse.Namespace, run: tj.Run, origin: dict[str, Any]) -> Reports:
    """Writes `huggingface` in a folder."""
    folder = place / "huggingface"
    model_type, notes = _write_files(folder, options, run, origin)
    if not options.check:
        return model_type, [NOT_CHECKED], notes
    tokenizer = (folder / "tokenizer_config.json").is_file()
    reports = [export_checks.check_transformers(folder, run, tokenizer=tokenizer)]
    converted = export_checks.check_ctranslate2(folder, run) if tokenizer else None
    return model_type, reports if converted is None else [*reports, converted], notes


def _save_adapter(place: Path, options: argparse.Namespace, run: tj.Run, origin: dict[str, Any]) -> Reports:
    """Writes `peft` in a folder.

    Raises:
        UserError: the base is not known, or the run has no adapter that PEFT has.
    """
    folder, base, model_type = place / "peft", _base(options, origin), options.model_type or origin.get("model_type")
    if not base:
        raise UserError(
            "the checkpoint that the adapter changes is not known: export train.start_from, and name it by --base"
        )
    if not options.base and (change := _change_since_import(Path(run.config.train.start_from or run.path), origin)):
        raise UserError(f"{run.config.train.start_from} is {base} with {change}: export it, and name it by --base")
    if Path(base).is_dir():
        model_type = files.read_config(Path(base))["model_type"]
    if model_type is None:
        raise UserError(f"the architecture of {base} is not known: add --model-type")
    adapted = load_adapted(run.path, run.config, mesh_of(run.params), run.step)
    folder.mkdir()
    cfg, alpha = run.config.model, run.config.train.lora_alpha
    adapters.save(folder, hf.architecture_of(model_type, cfg.family), cfg, adapted.trainable, alpha=alpha, base=base)
    return model_type, [export_checks.check_adapter(folder, base, run) if options.check else NOT_CHECKED], []


def _change_since_import(run: Path, origin: dict[str, Any]) -> str:
    """Returns how the run from which an adapter started differs from its checkpoint; "" if it does not."""
    if not (as_path(run) / run_folder.IMPORTED).exists():
        return "trained weights"
    changes = {"another vocabulary": vocabulary.RECORD, "kernels of int8": run_folder.QUANTIZED}
    records = (change for change, record in changes.items() if (as_path(run) / record).is_file())
    return "an adapter" if "adapter" in origin else next(records, "")


def _base(options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """Returns the name or the folder of the checkpoint that an adapter changes; "" if it is not known."""
    return str(options.base or origin.get("checkpoint", ""))


def _save_converted(place: Path, options: argparse.Namespace, run: tj.Run, origin: dict[str, Any]) -> Reports:
    """Writes `huggingface` in a folder, and converts it to `ctranslate2` beside it.

    Raises:
        UserError: CTranslate2 does not have the architecture, or the run's tokenizer cannot be written.
    """
    checkpoint, converted = place / "huggingface", place / "ctranslate2"
    model_type, notes = _write_files(checkpoint, options, run, origin)
    if not (checkpoint / "tokenizer_config.json").is_file():
        raise UserError("CTranslate2 needs the names of all tokens, but transformers has no class for this tokenizer")
    with export_checks.without_warnings():
        try:
            ctranslate2_models.convert(checkpoint, converted, options.quantization)
        except Exception as error:  # the library raises many types
            raise UserError(f"CTranslate2 cannot convert this model ({first_line(error, 200)})") from error
    reports = [NOT_CHECKED]
    if options.check:
        read = export_checks.check_transformers(checkpoint, run, tokenizer=True)
        reports = [read, export_checks.check_converted(checkpoint, converted, run, options.quantization)]
    for path in checkpoint.iterdir():
        if path.name not in ONLY_HUGGINGFACE:
            path.replace(converted / path.name)
    decode = run.config.decode
    unwritten = [f"decode.{name}={getattr(decode, name)!r}" for name in ("stop", "min_p") if getattr(decode, name)]
    return model_type, reports, [*notes, *(f"CTranslate2 does not have {setting}" for setting in unwritten)]


WRITERS = {"huggingface": _save_checkpoint, "ctranslate2": _save_converted, "peft": _save_adapter}
"""Functions that write a folder of this name in another one, by the format of the export."""


def _write_files(
    folder: Path, options: argparse.Namespace, run: tj.Run, origin: dict[str, Any]
) -> tuple[str, list[str]]:
    """Writes all files; returns the model type, and what the files do not hold."""
    special = run.tokenizers.target.special
    model_type = _save_model(folder, options, run, origin)
    rows = run.config.model.size("vocab_size")
    why_not = export_tokenizers(folder, run.tokenizers, model_type, pair=run.model.reads_source, rows=rows)
    notes = [f"without a tokenizer: {why_not}"] if why_not else []
    if symbol := unspaced_symbol(run.tokenizers.target):
        notes.append(f"texts that AutoTokenizer decodes may lack the space before a symbol, such as {symbol!r}")
    chat = run.tokenizers.target.chat
    companions.write(folder, origin.get("companions", {}), run.config.model.max_length, chat)
    notes += _without_other_modules(folder, run, origin.get("companions", {}))
    fields = hf.token_ids(special, run.config.model)
    unwritten: list[str] = []
    if run.model.decodes:
        settings, unwritten = generation.generation_fields(run.config.decode, run.config.model)
        sizes = run.tokenizers.target.vocab_size, run.config.model.size("vocab_size")
        fields |= settings | generation.suppressed_fields(special, *sizes)
        forced, lost = _forced_language(run, origin)
        fields, notes = fields | forced, notes + lost
    (folder / "generation_config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if names := run.tokenizers.placeholders.names:
        notes.append(f"not written: data.placeholders={names!r}; symbols from U+F0000 on stand for them in all texts")
    return model_type, [*notes, *([f"not written: {', '.join(unwritten)}"] if unwritten else [])]


def _forced_language(run: tj.Run, origin: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the field of the language that all outputs of the checkpoint have, or a note if the run lacks it."""
    language = origin.get("companions", {}).get(companions.FORCED_LANGUAGE)
    if language is None:
        return {}, []
    if language in run.languages.targets:
        return {"forced_bos_token_id": languages_of(run.tokenizers.target)[language]}, []
    return {}, [f"not written: forced_bos_token_id of {language}, into which the run does not translate"]


def _without_other_modules(folder: Path, run: tj.Run, written: dict[str, Any]) -> list[str]:
    """Removes sentence-transformers' files if they embed texts in another way than the run; returns a note about it."""
    if not (folder / sentence_transformers.MODULES).is_file():
        return []
    theirs = sentence_transformers.read_embedding(folder, run.tokenizers.source, run.config.model.max_length)
    ours = dataclasses.replace(run.config.embed, only=theirs.only)
    differing = [
        field.name for field in dataclasses.fields(ours) if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if not differing:
        return []
    companions.remove_modules(folder, written)
    settings = ", ".join(f"embed.{name}={getattr(ours, name)!r}" for name in differing)
    return [f"not written: {sentence_transformers.MODULES} of sentence-transformers, because the run has {settings}"]


def _origin(run: tj.Run) -> tuple[dict[str, Any], list[str]]:
    """Returns `imported.json` of the imported run from which training started, through any number of runs, and a note.

    It is {} for a run with other tokenizers than the imported one. The note says which run is missing.
    """
    path, passed = run.path, set()
    while resolved(path) not in passed:
        passed.add(resolved(path))
        if (path / run_folder.IMPORTED).exists():
            same = path == run.path or _has_tokenizers_of(path, run)
            return (run_folder.read_json(path / run_folder.IMPORTED) if same else {}), []
        start = run_folder.read_json(path / "config.json")["train"].get("start_from")
        if start is None:
            break
        later, path = path, as_path(start)
        if not (path / "config.json").exists():
            lost = "what it may have of an imported checkpoint is not written"
            return {}, [f"{path}, from which {later} started, does not exist: {lost}"]
    return {}, []


def _has_tokenizers_of(folder: Path, run: tj.Run) -> bool:
    theirs, ours = Tokenizers.load(folder / "tokenizers"), run.tokenizers
    sides = ((theirs.source, ours.source), (theirs.target, ours.target))
    return all(before.vocab_size == after.vocab_size and same_tokens(before, after) for before, after in sides)


def _save_model(folder: Path, options: argparse.Namespace, run: tj.Run, origin: dict[str, Any]) -> str:
    """Writes the model as the given or original `model_type`, or as the first one that holds it; returns that one.

    Raises:
        UserError: no architecture holds the model exactly.
    """
    kind = origin.get("model_type")
    given = options.model_type or (kind if kind in hf.ARCHITECTURES else None)
    special = run.tokenizers.target.special
    theirs = hf.token_ids(special, run.config.model)
    heads = companions.head_fields(origin.get("companions", {}), special) if given == kind else {}
    if run.labels is not None:
        theirs |= label_fields(run.labels)
    problems = set()
    for model_type in [given] if given else hf.ARCHITECTURES:
        try:
            named = {"tokenizer_class": "PreTrainedTokenizerFast"} if model_type == "mbart" else {}
            named |= language_options(run.tokenizers.target, model_type)  # CTranslate2 asks config.json for its class
            named.pop("additional_special_tokens", None)
            hf.save(folder, model_type, run.config.model, run.params, heads=heads, **theirs | named)
            return model_type
        except UserError as error:
            if given:
                raise UserError(f"{error}{_advice(run.config.model, [given])}") from error
            problems.add(str(error).partition(": ")[2])
    reason = f": {problems.pop()}" if len(problems) == 1 else ""
    advice = "" if reason else _advice(run.config.model, hf.ARCHITECTURES)
    raise UserError(f"none of the architectures {', '.join(hf.ARCHITECTURES)} represents this model{reason}{advice}")


def _advice(cfg: ModelConfig, model_types: Iterable[str]) -> str:
    """Returns the settings to train with for the first architecture that needs the fewest changes; "" for no advice."""
    changes = {model_type: hf.needed_changes(cfg, model_type) for model_type in model_types}
    counted = [(len(needed), model_type) for model_type, needed in changes.items() if needed]
    fewest = min(counted, key=lambda pair: pair[0], default=None)
    return "" if fewest is None else f"; {fewest[1]!r} needs a model trained with {', '.join(changes[fewest[1]] or ())}"
