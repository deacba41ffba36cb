"""Pages and arrays of what a model computes from texts, for `scripts/attention.py` and the server."""

import argparse
import dataclasses
import functools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tformer_jax as tj
from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import counted
from tformer_jax.base.paths import replacing
from tformer_jax.cli import languages
from tformer_jax.cli.common import load_run, reporting_writes, write_output
from tformer_jax.cli.inputs import Source
from tformer_jax.data.characters import is_blank
from tformer_jax.data.corpora.example import DataError
from tformer_jax.data.tokenizers import token_texts
from tformer_jax.data.word_links import check_words, read_references
from tformer_jax.inference.alignment import head_error_rates
from tformer_jax.inference.requests import as_request
from tformer_jax.inference.watch import Watched
from tformer_jax.report import attention
from tformer_jax.runs import run_folder

SHOWN = 10
"""Number of heads whose error rates are printed."""
EMPTY = "the text is empty: write at least one character"


def write_outputs(options: argparse.Namespace, page: Path) -> None:
    """Writes arrays to `--npz`, if it is given, and without `--batch` the page of the text."""
    source = Source([] if options.text is None else [options.text], options.batch)
    texts = [line.texts[0] for line in source.lines({"--field": options.field})]
    run = load_run(options)
    languages.check_languages(options, run.config.model)
    examples = complete_examples(run, texts, functools.partial(languages.make_request, options))
    if options.links:
        choose_head(options.links, run, texts, examples)
    if options.npz:
        with reporting_writes(options.npz), replacing(options.npz) as partial:
            write_arrays(partial, run, run.watch(examples))
        print(options.npz)
    if options.batch is None:
        write_output(page, render_example(run, examples[0], layer=options.layer, head=options.head))
        print(page)


def choose_head(path: Path, run: tj.Run, lines: Sequence[str], pairs: Sequence[Any]) -> None:
    """Prints the alignment error rates of the best heads by the links of a file, and records the best one in the run.

    Raises:
        UserError: the file is no file of links with a line for each pair.
    """
    if not run.model.reads_source or not all("\t" in line for line in lines):
        raise UserError("--links needs a translation model, and source<tab>target in each line of --batch")
    references = read_references(path)
    if len(references) != len(pairs):
        raise UserError(
            f"{path} has {counted(len(references), 'line')} for {counted(len(pairs), 'pair')}: write one for each"
        )
    for number, (reference, pair) in enumerate(zip(references, lines, strict=True), start=1):
        try:
            check_words(reference.possible, *pair.split("\t"))
        except DataError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    rates = head_error_rates(run.tokenizers, pairs, run.watch(pairs), references, run.config.data.transforms)
    for head, rate in list(rates.items())[:SHOWN]:
        name = "mean of the heads" if head.head is None else f"head {head.head}"
        print(f"alignment error rate {rate:.3f}: layer {head.layer}, {name}, read where it {head.query} a token")
    best, rate = next(iter(rates.items()))
    facts = {"error_rate": rate, "pairs": len(pairs), "links": path.name}
    with reporting_writes(run.path / run_folder.CHOSEN_HEAD):
        print(run_folder.write_chosen_head(run.path, best, facts))


def complete_examples(run: tj.Run, texts: Sequence[str], make_request: Callable[[str], Any] = str) -> list[Any]:
    """Returns examples for `run.watch`: texts, or pairs of source and target or translation.

    The texts of a prefix LM are prompts, or prompt<tab>continuation. `make_request` adds languages to a source.

    Raises:
        UserError: a pair has more than two columns, or a translation has more tokens than the model takes.
    """
    if not (run.config.model.prefix_lm or run.model.reads_source):
        return list(texts)
    pairs = [text.split("\t") for text in texts]
    if wide := [number for number, columns in enumerate(pairs, start=1) if len(columns) > 2]:
        count = len(pairs[wide[0] - 1])
        raise UserError(f"text {wide[0]} has {count} columns: write at most two, with a tab between them")
    if run.config.model.prefix_lm:
        return [(prompt, "".join(continuation)) for prompt, *continuation in pairs]
    sources = [make_request(source) for source, *target in pairs if not target]
    translated = list(zip(sources, run.translate(sources) if sources else [], strict=True))
    for example in translated:
        try:
            run.weight_shapes(example)
        except UserError as error:  # a text of incomplete characters takes more tokens
            problem = f"cannot be read as a target ({error}): write a target of your own after a tab"
            raise UserError(f"the translation {example[1][:40]!r} {problem}") from error
    rest = iter(translated)
    return [(make_request(source), target[0]) if target else next(rest) for source, *target in pairs]


def render_example(run: tj.Run, example: Any, *, layer: int | None = None, head: int | None = None) -> str:
    """Returns the page of one example, which shows this layer and head first; see `report.attention.render`.

    Raises:
        UserError: the text is empty or too long for a page, or the model has no such layer or head.
    """
    texts = example if isinstance(example, str) else (as_request(example[0]).text, *example[1:])
    if is_blank(texts[0]) if run.model.reads_source else not "".join(texts):
        raise UserError(EMPTY)
    shapes = run.weight_shapes(example).values()
    for name, axis, wanted in (("layer", 0, layer), ("head", 1, head)):
        count = max((shape[axis] for shape in shapes), default=0)
        if wanted is not None and wanted >= count:
            raise UserError(f"--{name} {wanted}: the model has {name}s 0 to {count - 1}")
    with_heads = attention.has_heads(shapes, head)
    (watched,) = run.watch([example])
    tokens = read_tokens(run, watched)
    names = ("source", "target") if run.model.reads_source else ("prompt", "continuation")
    parts = {"text": texts} if isinstance(texts, str) else dict(zip(names, texts, strict=True))

    def label(number: int) -> str:
        if run.model.classifies:
            return run.labels[number] if run.labels else str(number)
        return attention.visible(token_texts(run.tokenizers.target, [number])[0])

    shown = run.path.name, parts, watched, tokens, label
    return attention.render_attention(*shown, layer=layer, head=head, with_heads=with_heads)


def read_tokens(run: tj.Run, watched: Watched) -> dict[str, list[str]]:
    """Returns the texts of the tokens that the stacks "encoder" and "decoder" read, as far as the model has them.

    Raises:
        UserError: there are none.
    """
    texts = {key: token_texts(_tokenizer(run, key), ids.tolist()) for key, ids in watched.tokens.items()}
    if not all(texts.values()):
        raise UserError(EMPTY)
    kinds = run.model.attentions.items()
    return {kind: texts[queries] for kind, (queries, _) in kinds if kind != "cross"}


def write_arrays(path: Path, run: tj.Run, results: Iterable[Watched]) -> None:
    """Writes an .npz file with the arrays of one example after the other, and the texts of its tokens."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, watched in enumerate(results):
            for name, array in _arrays(run, watched):
                with archive.open(f"{number}/{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _arrays(run: tj.Run, watched: Watched) -> Iterator[tuple[str, np.ndarray]]:
    for key, ids in watched.tokens.items():
        yield f"texts/{key}", np.array(token_texts(_tokenizer(run, key), ids.tolist()), np.str_)
    for field in dataclasses.fields(watched):
        value = getattr(watched, field.name)
        named = value if isinstance(value, dict) else {"": value}
        yield from ((f"{field.name}/{name}".rstrip("/"), np.asarray(array)) for name, array in named.items())


def _tokenizer(run: tj.Run, key: str) -> Any:
    return run.tokenizers.source if key == "source" else run.tokenizers.target
