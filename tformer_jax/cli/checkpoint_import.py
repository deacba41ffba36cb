"""Makes a run folder of a checkpoint, for `scripts/import_hf.py`."""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.sharding import Mesh

from tformer_jax.base.errors import UserError
from tformer_jax.base.json_files import read_json
from tformer_jax.base.paths import checksum, resolved
from tformer_jax.config import Config, DataConfig, DecodeConfig, EmbedConfig, ModelConfig, read_mesh
from tformer_jax.config.task import tasks_of_family
from tformer_jax.data.chat import template
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
from tformer_jax.data.tokenizers.language_tags import languages_of, tag_names, tagged_language
from tformer_jax.data.tokenizers.standalone import is_fairseq_dictionary, load_standalone_tokenizers
from tformer_jax.interop import companions, files, generation, gguf, hf, hub, marian, sentence_transformers, state_dicts
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import run_folder, weights
from tformer_jax.runs.guards import locked

NO_CLASSES = "the checkpoint has no classification head: the run has a random one, to be trained"
HEADLESS = "the checkpoint has no output head: the run embeds texts, and generates only after training"
WIDENED = "the parameters are float32: in bfloat16, as in the checkpoint, small changes of the adapter would be lost"
LANGUAGE_FIELDS = ("source_language", "target_language")
"""Fields of JSONL files for fine-tuning that hold the languages of a pair."""
TARGET_TAGS = ("<2", ">>")
"""Beginnings of the tags of MADLAD-400 and Marian, with which sources name the language of their translation."""
PARAM_DTYPES = ("float32", "bfloat16")
CONTAINERS: dict[str, Callable[[Path, Path], files.StoredArrays]] = {".gguf": gguf.unpack, ".npz": marian.unpack}
"""Functions that write the JSON files of a checkpoint in one file to a folder and return its arrays, by its suffix."""


class Imported(NamedTuple):
    """The contents of a checkpoint."""

    kind: str
    """`model_type` of config.json, or the name of a layout of state dicts."""
    files: Sequence[Path]
    model: ModelConfig
    params: Any
    tokenizers: Tokenizers
    decode: DecodeConfig
    labels: list[str] | None = None
    notes: Sequence[str] = ()
    """Messages for the user."""
    embed: EmbedConfig = EmbedConfig()
    companions: Mapping[str, Any] = MappingProxyType({})
    """What `companions.read` returns, and the language that all outputs have by `FORCED_LANGUAGE` of that module."""


def make_run(options: argparse.Namespace) -> None:
    """Makes the run folder `options.run` of the checkpoint `options.checkpoint`, replacing an earlier run.

    Raises:
        UserError: the checkpoint is damaged, this package cannot represent it, or another process uses the folder.
    """
    path, run = Path(options.checkpoint), options.run
    _check_flags(options, path)
    mesh = None if options.mesh is None else make_mesh(read_mesh(options.mesh))
    given = {"family": options.family, "max_length": options.max_length, "adapter": options.adapter}
    settings = {"mesh": mesh} | {name: value for name, value in given.items() if value is not None}
    if path.suffix in CONTAINERS and path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            settings["arrays"] = CONTAINERS[path.suffix](path, Path(folder))
            try:
                imported = _read_folder(Path(folder), settings)._replace(files=[path])
            except UserError as error:
                raise UserError(str(error).replace(folder, str(path))) from error
    elif path.is_file():
        imported = _read_state_dict(path, options, mesh)
    else:
        imported = _read_folder(path if path.exists() else hub.download(options.checkpoint), settings)
    cfg = Config(
        name=run.name,
        model=imported.model,
        data=_data_settings(run, imported.model, imported.tokenizers),
        decode=imported.decode,
        embed=imported.embed,
    )
    adapter = [] if options.adapter is None else sorted(path for path in options.adapter.iterdir() if path.is_file())
    checksums = {file.name: checksum(file) for file in imported.files}
    checksums |= {f"adapter/{file.name}": checksum(file) for file in adapter}
    source = str(path.resolve()) if path.exists() else options.checkpoint
    origin = {"model_type": imported.kind, "checkpoint": source, "sha256": checksums}
    if options.adapter is not None:
        origin["adapter"] = str(options.adapter.resolve())
    with locked(run), run_folder.creating(run, cfg, imported.tokenizers, imported.labels) as folder:
        run_folder.write_json(folder / run_folder.IMPORTED, origin | {"companions": dict(imported.companions)})
        weights.save(folder, imported.params, "imported", [], 0)
    print(f"{run}: {imported.kind}, {imported.model.family}, vocabulary of {imported.model.vocab_size:,}")
    for note in imported.notes:
        print(note, file=sys.stderr)


def _check_flags(options: argparse.Namespace, path: Path) -> None:
    """Raises `UserError` for a flag that this kind of checkpoint does not use."""
    if path.is_file() and path.suffix not in CONTAINERS:
        given = {"--family": options.family, "--adapter": options.adapter, "--max-length": options.max_length}
        reason = "is for checkpoints in Hugging Face's format"
    else:
        given = {"--tokenizer": options.tokenizer, "--model-args": options.model_args}
        reason = "is for state dicts of PyTorch"
    for flag, value in given.items():
        if value:
            raise UserError(f"{flag} {reason}, but {options.checkpoint} is not one: leave it out")


def _read_folder(folder: Path, settings: dict[str, Any]) -> Imported:
    """Reads a folder in Hugging Face's format; `settings` are of `hf.load`."""
    theirs = files.read_config(folder)
    cfg, params, headless = _load_model(folder, theirs, settings)
    tokenizers = _fit_tokenizers(folder, load_checkpoint_tokenizers(folder), cfg)
    decode, unapplied = generation.read_decoding(folder, theirs, cfg)
    unapplied += ["clean_up_tokenization_spaces=True"] if _cleans_up(folder, cfg, tokenizers.target) else []
    labels = None if headless or not cfg.model_class.classifies else hf.labels(theirs | {"num_labels": cfg.num_classes})
    only_embeds = headless and cfg.model_class.continues
    notes = [HEADLESS if only_embeds else NO_CLASSES] if headless else []
    notes += [f"not applied: {', '.join(unapplied)}"] if unapplied else []
    if "adapter" in settings:
        notes += [WIDENED] if _stored_dtype(theirs) == "bfloat16" else []
        notes += _unread_template(settings["adapter"], folder, tokenizers.target) if cfg.model_class.continues else []
    first = tokenizers.target.special.name(generation.forced_first(folder, theirs))
    beside = companions.read(folder, tokenizers.target)
    if first and (language := tagged_language(first)):
        beside[companions.FORCED_LANGUAGE] = language
        notes.append(f"its outputs start with {first} only if it is named: --to {language}")
    if "arrays" not in settings and (images := files.image_arrays(folder)):
        notes.append(f"not read: {len(images)} arrays of images; the run is of texts alone")
    if unread := files.unread_weights(folder, settings.get("adapter")):
        notes.append(f"{files.SINGLE} is read; not read: {', '.join(unread)}")
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    embed = sentence_transformers.read_embedding(folder, tokenizers.source, cfg.max_length)
    if changed := list(embed.changed_settings()):
        written = ", ".join(f"embed.{name}={getattr(embed, name)!r}" for name in changed)
        notes.append(f"{sentence_transformers.MODULES} of sentence-transformers: {written}")
    embed = dataclasses.replace(embed, only=only_embeds)
    origin = theirs["model_type"], paths, cfg, params, tokenizers, decode, labels, notes, embed
    return Imported(*origin, beside)


def _unread_template(adapter: Path, folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Returns a note if the folder of an adapter has another chat template than the checkpoint, which is not read."""
    file = next((adapter / name for name in template.FILES if (adapter / name).is_file()), None)
    if file is None:
        return []
    own = file.read_text("utf-8") if file.suffix == ".jinja" else read_json(file).get("chat_template")
    text = template.default_template(own)
    if not text or (tokenizer.chat and tokenizer.chat.text == text):
        return []
    place = folder / template.TEMPLATE_FILE
    return [f"not read: the chat template in {file}; save it as {place}, and import again, for a run that has it"]


def _cleans_up(folder: Path, cfg: ModelConfig, tokenizer: Tokenizer) -> bool:
    """Returns whether transformers removes the spaces before punctuation from outputs, which are left here."""
    options = read_json(folder / "tokenizer_config.json", {})
    if not cfg.model_class.decodes or options.get("clean_up_tokenization_spaces") is not True:
        return False
    library = getattr(tokenizer, "backend_tokenizer", None)
    return library is None or type(library.model).__name__ != "BPE"


def _read_state_dict(path: Path, options: argparse.Namespace, mesh: Mesh | None) -> Imported:
    """Reads a file of `torch.save`, whose tokenizers are given."""
    if path.suffix not in state_dicts.SUFFIXES:
        raise UserError(f"{path} is a file: name a folder, or a {' or '.join(state_dicts.SUFFIXES)} of torch.save")
    if not options.tokenizer:
        raise UserError(f"{path} has no tokenizer: add --tokenizer FILE, or two files, of the source and the target")
    kind, cfg, params = state_dicts.load(path, dict(options.model_args), mesh=mesh)
    tokenizers = load_standalone_tokenizers(options.tokenizer, pair=cfg.model_class.reads_source)
    source_size = cfg.source_vocab_size if cfg.model_class.reads_source else cfg.vocab_size
    sides = (tokenizers.source, source_size), (tokenizers.target, cfg.vocab_size)
    for file, (tokenizer, size) in zip((options.tokenizer[0], options.tokenizer[-1]), sides, strict=True):
        if file.suffix == ".txt" and tokenizer.vocab_size != size:
            unit = "tokens" if is_fairseq_dictionary(file) else "characters"
            raise UserError(
                f"{file} has {tokenizer.vocab_size} different {unit}, but the model was trained on {size}: name the "
                "file that it was trained on"
            )
    files_read = [path, *options.tokenizer]
    return Imported(kind, files_read, cfg, params, _fit_tokenizers(path, tokenizers, cfg), DecodeConfig())


def _load_model(folder: Path, theirs: dict[str, Any], settings: dict[str, Any]) -> tuple[ModelConfig, Any, bool]:
    """Returns the config, the parameters, and whether the checkpoint has no head."""
    dtype = "float32" if "adapter" in settings else _stored_dtype(theirs)
    settings = {"param_dtype": dtype if dtype in PARAM_DTYPES else "float32", **settings}
    try:
        return *hf.load(folder, **settings), False
    except hf.NoHeadError:
        classes = {"num_classes": 2} if theirs["model_type"] in hf.CLASSIFIERS else {"headless": True}
        return *hf.load(folder, **settings, **classes), True


def _stored_dtype(theirs: dict[str, Any]) -> Any:
    return theirs.get("dtype") or theirs.get("torch_dtype")


def _fit_tokenizers(path: Path, tokenizers: Tokenizers, cfg: ModelConfig) -> Tokenizers:
    """Returns the tokenizers without the added special tokens that the model lacks, which no text needs.

    Raises:
        UserError: a tokenizer has other tokens that the model lacks.
    """
    V = cfg.size("vocab_size")
    source = cfg.size("source_vocab_size") if cfg.model_class.reads_source else V
    return Tokenizers(_limit_tokens(path, tokenizers.source, source), _limit_tokens(path, tokenizers.target, V))


def _limit_tokens(path: Path, tokenizer: Tokenizer, V: int) -> Tokenizer:
    if tokenizer.vocab_size <= V:
        return tokenizer
    limited = tokenizer.without_added(V)
    if limited.vocab_size > V or max(limited.special.used) >= V:
        raise UserError(f"{path}: its tokenizer has {tokenizer.vocab_size} tokens, and its model only {V}")
    return limited


def _data_settings(run: Path, cfg: ModelConfig, tokenizers: Tokenizers) -> DataConfig:
    """Returns data settings that fit the model, for fine-tuning on `train.jsonl` with the tokenizers of the run.

    Pairs have languages if the vocabulary has their tags.
    """
    length, task = min(64, cfg.max_length), tasks_of_family(cfg.family)[0]
    languages: dict[str, Any] = {}
    if cfg.model_class.reads_source and languages_of(tokenizers.target):
        languages = {"language_fields": LANGUAGE_FIELDS, "validation": ("validation.jsonl",)}
        if not all(name.startswith(TARGET_TAGS) for name in tag_names(tokenizers.target)):
            languages |= {"source_tags": ("source",), "target_tags": ("target",)}
    return DataConfig(
        **languages,
        source="jsonl",
        train=("train.jsonl",),
        tokenizer="file",
        tokenizer_file=str(resolved(run)),
        objective=task.objectives[0],
        batching="packed" if cfg.model_class.continues else task.batchings[0],
        bucket_lengths=(length,),
        window=length,
    )
