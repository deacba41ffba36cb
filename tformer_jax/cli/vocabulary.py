"""`scripts/vocabulary.py`: makes a run with fewer or more tokens."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer_jax.base.errors import UserError
from tformer_jax.base.numbers import MIB, counted
from tformer_jax.base.paths import check_replaceable, resolved
from tformer_jax.cli.common import (
    add_data,
    add_imports,
    add_mesh,
    add_number,
    add_path,
    load_run,
    new_parser,
    run_path,
)
from tformer_jax.config.directions import LANGUAGE
from tformer_jax.runs import run_folder
from tformer_jax.special_tokens import symbol_problem

if TYPE_CHECKING:
    from tformer_jax.api import Run
    from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
    from tformer_jax.runs.vocabulary import Sides

COUNT = 1000
"""Default number of words that a corpus adds."""
SHOWN = 5
"""Maximum number of words in a message."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a run whose vocabulary has other tokens, and prints its size before and after."""
    options = parser().parse_args(argv)
    check_output(options)
    from tformer_jax.runs import vocabulary
    from tformer_jax.runs.guards import locked
    from tformer_jax.runs.trained import Trained

    with locked(options.output, "--output"):
        run = load_run(options, needs_head=False)
        sides, facts = (_trim if options.change == "trim" else _extend)(options, run)
        before = Trained(run.config, run.model, run.params, run.tokenizers, run.labels)
        after = vocabulary.resize(before, sides)
        sizes = {"before": _sizes(before), "after": _sizes(after)}
        facts = {"change": options.change, **facts, **sizes}
        vocabulary.save(options.output, run.path, after, KINDS[options.change], facts, step=options.step)
    for name in sizes["before"]:
        old, new = (sizes[time][name] for time in ("before", "after"))
        print(f"{name}: {old:,} -> {new:,}" if isinstance(old, int) else f"{name}: {old:,.1f} -> {new:,.1f}")


KINDS = {"trim": "trimmed", "extend": "extended"}
"""What the weights of a run are called after each change."""


def check_output(options: argparse.Namespace) -> None:
    """Raises `UserError` if the new run would replace another one, or nothing would be added."""
    check_replaceable(options.output)
    output, run = resolved(options.output), resolved(options.run)
    if output == run or output in run.parents:
        raise UserError(f"--output {options.output} would replace the run that is changed: choose another folder")
    if run_folder.holds_run(options.output) and not options.overwrite:
        raise UserError(
            f"{options.output} already holds a run: add --overwrite to replace it, or choose another --output"
        )
    if options.change == "extend":
        named = (options.tokens, options.texts, options.corpus, options.tokenizer, options.symbols, options.languages)
        if not any(named):
            raise UserError("nothing to add: write --tokens, --texts, --corpus, --tokenizer, --symbols or --languages")
        if options.texts and options.corpus:
            raise UserError("--texts and --corpus name different texts: leave one of them out")


def _trim(options: argparse.Namespace, run: "Run") -> tuple["Sides", dict[str, Any]]:
    """Removes the tokens that the texts never use."""
    from tformer_jax.runs import vocabulary

    sides, usage = vocabulary.trim_tokenizers(run.config, run.tokenizers, _texts(options, run))
    if not usage.texts:
        raise UserError("the texts are empty, so that every token would be removed: name others with --texts")
    names = ("target",) if vocabulary.shares_vocabulary(run.config, run.tokenizers) else vocabulary.SIDES
    for side in names:
        print(f"tokens of {counted(usage.texts, 'text')}, {side}: {usage.used[side]:,}")
    print(f"texts with other tokens than before: {usage.changed:,}")
    return sides, {"used": dict(usage.used), "texts": usage.texts, "texts with other tokens": usage.changed}


def _extend(options: argparse.Namespace, run: "Run") -> tuple["Sides", dict[str, Any]]:
    """Adds the tokens that the flags name to both sides; with a corpus, each side gets the words of its own texts."""
    from tformer_jax.data.languages import describe_unknown
    from tformer_jax.data.tokenizers.surgery import extend
    from tformer_jax.runs import vocabulary

    texts, shared = _texts(options, run), vocabulary.shares_vocabulary(run.config, run.tokenizers)
    pieces: dict[str, list[str]] = {}
    for both in [vocabulary.SIDES] if shared else [(side,) for side in vocabulary.SIDES]:
        tokenizer = getattr(run.tokenizers, both[-1])
        pieces |= dict.fromkeys(both, _new_pieces(options, tokenizer, functools.partial(_joined, texts, both)))
    symbols, languages = options.symbols, [code.replace("-", "_") for code in options.languages]
    _check_names(symbols, languages, run.tokenizers)
    if unknown := describe_unknown(languages):
        logging.getLogger(__name__).warning("%s: if they are none, correct --languages", unknown)
    sides = {side: extend(getattr(run.tokenizers, side), pieces[side], symbols, languages) for side in vocabulary.SIDES}
    if shared and sides["source"].rows != sides["target"].rows:
        raise UserError(f"{run.path} has two tokenizers with the ids of one vocabulary, which cannot be extended")
    added = {side: sides[side].tokenizer.vocab_size - getattr(run.tokenizers, side).vocab_size for side in sides}
    if not any(added.values()):
        raise UserError(f"nothing to add: {run.path} has these tokens, or splits texts within them")
    for side in ["target"] if shared else vocabulary.SIDES:
        words, others = len(pieces[side]), "symbols, tags and the pieces that words are merged from"
        print(f"{side}: {counted(added[side], 'new token')}: {counted(words, 'word')}, {others}")
    return sides, {"added": added}


def _check_names(symbols: Sequence[str], languages: Sequence[str], tokenizers: "Tokenizers") -> None:
    """Raises `UserError` for a text that can be no symbol of the tokenizers, or no code of a language."""
    names = {name for each in (tokenizers.source, tokenizers.target) for _, name in each.special.names}
    for symbol in symbols:
        problem = "is the name of a special token; choose another text" if symbol in names else symbol_problem(symbol)
        if problem:
            raise UserError(f"--symbols {symbol!r}: {problem}")
    for code in languages:
        if not LANGUAGE.fullmatch(code):
            raise UserError(f"--languages {code!r}: must be a code of letters, such as de or pt_BR")


def _new_pieces(options: argparse.Namespace, tokenizer: "Tokenizer", texts: Callable[[], Iterable[str]]) -> list[str]:
    """Returns the pieces of the list, of the texts and of the other tokenizer, once each."""
    from tformer_jax.data.tokenizers import new_pieces

    pieces: list[str] = []
    if options.tokens:
        words = [line for line in map(str.strip, _lines(options.tokens)) if line]
        pieces, refused = new_pieces.pieces_of_list(tokenizer, words)
        if refused:
            some = ", ".join(map(repr, refused[:SHOWN])) + (", ..." if len(refused) > SHOWN else "")
            print(f"not added, since texts are split within them: {some} (--symbols adds any text)", file=sys.stderr)
    if options.texts or options.corpus:
        pieces += new_pieces.pieces_of_texts(tokenizer, texts(), options.count or COUNT)
    if options.tokenizer:
        pieces += new_pieces.pieces_of_tokenizer(tokenizer, _read_tokenizer(options.tokenizer), options.count)
    return list(dict.fromkeys(pieces))


def _read_tokenizer(path: Path) -> "Tokenizer":
    """Returns the tokenizer of a file, or of the target of a run or a checkpoint."""
    from tformer_jax.data.tokenizers import Tokenizers
    from tformer_jax.data.tokenizers.checkpoints import load_checkpoint_tokenizers
    from tformer_jax.data.tokenizers.files import load_tokenizer

    if not path.is_dir():
        return load_tokenizer(path, "--tokenizer")
    if (path / "tokenizers").is_dir():
        return Tokenizers.load(path / "tokenizers").target
    return load_checkpoint_tokenizers(path).target


def _joined(texts: Callable[[str], Iterable[str]], sides: Sequence[str]) -> Iterator[str]:
    for side in sides:
        yield from texts(side)


def _texts(options: argparse.Namespace, run: "Run") -> Callable[[str], Iterable[str]]:
    """Returns a function of a side that yields the texts of the files, or of the run's data."""
    if options.texts:
        return lambda side: _texts_of_files(options.texts, whole=not run.model.reads_source and run.model.decodes)
    if options.change == "extend" and not options.corpus:
        return lambda side: ()
    return _texts_of_corpus(options, run)


def _texts_of_corpus(options: argparse.Namespace, run: "Run") -> Callable[[str], Iterable[str]]:
    """Returns a function that yields the texts of a side of all splits; of generated data, a sample."""
    from tformer_jax.data.corpora import load_corpus
    from tformer_jax.data.corpora.corpus import CHATS, Endless
    from tformer_jax.data.placeholders import mask_example
    from tformer_jax.data.tokenizers.chats import written_text

    corpus, data = load_corpus(run.config, options.data), run.config.data

    def texts(side: str) -> Iterator[str]:
        for split in (corpus.train, corpus.validation, corpus.test):
            size = data.tokenizer_examples if isinstance(split, Endless) else len(split)
            for number in range(min(size, len(split))):
                example = mask_example(run.tokenizers.placeholders, split[number])
                yield from (example[key] for key in (side, "text") if key in example)
                yield from (written_text(run.tokenizers.target, example[key]) for key in CHATS if key in example)

    return texts


def _texts_of_files(paths: Sequence[Path], *, whole: bool) -> Iterator[str]:
    """Yields the lines of files; if `whole`, each file as one text, too."""
    for path in paths:
        lines = list(_lines(path))
        yield from lines
        if whole:
            yield "\n".join(lines)


def _lines(path: Path) -> Iterator[str]:
    from tformer_jax.data.corpora.lines import BadLines, numbered_lines

    return (line for _, line in numbered_lines(path, BadLines()) if line is not None)


def _sizes(trained: Any) -> dict[str, Any]:
    """Returns the sizes of the vocabularies, the number of parameters, and their size in MiB."""
    from tformer_jax.models import cost

    model, sides = trained.cfg.model, {}
    if model.model_class.reads_source:
        sides["tokens of the source"] = model.size("source_vocab_size")
    count = sum(cost.by_module(trained.params).values())
    sides["tokens"] = model.size("vocab_size")
    return {**sides, "parameters": count, "MiB of parameters": cost.size_bytes(trained.params) / MIB}


def parser() -> argparse.ArgumentParser:
    result = new_parser("vocabulary", "Makes a run with another vocabulary, whose other parameters are the same.")
    changes = result.add_subparsers(dest="change", required=True, metavar="CHANGE")
    trim = changes.add_parser("trim", help="remove the tokens that a corpus never uses")
    extend = changes.add_parser("extend", help="add tokens, symbols or tags of languages")
    for change in (trim, extend):
        change.add_argument("run", type=run_path, metavar="RUN", help="run folder, trained or imported")
        change.add_argument("--output", type=run_path, required=True, metavar="DIR", help="run folder to make")
        change.add_argument("--overwrite", action="store_true", help="replace the run in --output")
        add_number(change, "--step", "use the checkpoint of this step", lowest=0)
        add_path(change, "--texts", "files of lines (trim: instead of the run's data)", nargs="+")
        add_data(change)
        add_mesh(change)
        add_imports(change)
    extend.add_argument("--corpus", action="store_true", help="add words of the run's data")
    add_path(extend, "--tokens", "add the words of this file, one per line")
    add_path(extend, "--tokenizer", "add the tokens of this tokenizer: a file, a run or a checkpoint", unit="PATH")
    add_number(
        extend,
        "--count",
        f"add at most N words of texts that save the most tokens (default: {COUNT}), and at most N tokens of "
        "--tokenizer (default: all)",
    )
    extend.add_argument(
        "--symbols", nargs="+", default=(), metavar="TEXT", help="add texts that are one token anywhere"
    )
    extend.add_argument(
        "--languages", nargs="+", default=(), metavar="CODE", help="add the tags of languages that the run lacks"
    )
    return result
