"""Alignment error rates of attention heads and of guided alignment, and markup that alignments put back.

The corpus is made: a lexicon of pseudo-words, some of which are two words in the other language, and rules that change
the order (an adjective after its noun, the verb at the end), so that every link is known. Three translators of equal
settings are trained: without links, with the known ones, and with those that eflomal (Östling and Tiedemann, 2016)
estimates in both directions, as a user without known links would have. The head is chosen on the validation pairs by
the known links, and its error rate is that of the test pairs. The translator with known links then translates 1,000
texts with random tags and placeholders, which `decode.markup="align"` must neither lose nor invent.

pip install eflomal==2.0.0
python -m tests.programs.alignments --record tests/programs/alignments.json
"""

import argparse
import collections
import itertools
import random
import re
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

import tformer_jax as tj
from tests import commands
from tformer_jax.cli import train
from tformer_jax.config.decode import AlignmentHead
from tformer_jax.data.word_links import error_rate, format_links, read_links
from tformer_jax.inference.alignment import head_error_rates

SIZES = {"train": 6000, "validation": 200, "test": 500}
SEGMENTS = 1000
STEPS = 400
MARK = re.compile(r"<[^>]*>|\{\d\}|%s")
CONFIG = """
from tformer_jax.config import *


def get_config():
    return to_config_dict(Config(
    name={name!r},
    model=ModelConfig(family="seq2seq", dim=64, num_heads=4, ffn_dim=128, encoder_layers=2, decoder_layers=2,
                      max_length=96, dropout=0.1),
    data=DataConfig(source="parallel_lines", source_language="xx", target_language="yy", train=("train.{{lang}}",),
                    validation=("validation.{{lang}}",), test=("test.{{lang}}",), links={links!r}, vocab_size=800,
                    bucket_lengths=(32, 64, 96), batch_tokens=2048),
    optim=OptimConfig(learning_rate=2e-3, warmup_steps=100),
    train=TrainConfig(steps={steps}, eval_every={steps}, checkpoint_every={steps}, log_every=100,
                      guided_alignment={weight}),
    eval=EvalConfig(examples=50),
    decode=DecodeConfig(max_new_tokens=48, alignment_head={head}),
    ))
"""


class Pair(NamedTuple):
    """A source, its target, and the links between their words."""

    source: list[str]
    target: list[str]
    links: list[tuple[int, int]]


def lexicon(draw: random.Random) -> dict[str, list[tuple[list[str], list[str]]]]:
    """Returns entries (words of the source, words of the target) by part of speech; one in six is two words."""
    used: set[str] = set()

    def word() -> str:
        while (made := "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(2))) in used:
            pass
        used.add(made)
        return made

    sizes = {"determiner": 4, "adjective": 30, "noun": 60, "verb": 30, "preposition": 6}
    return {
        name: [
            ([word() for _ in range(1 + (draw.random() < 1 / 6))], [word() for _ in range(1 + (draw.random() < 1 / 6))])
            for _ in range(size)
        ]
        for name, size in sizes.items()
    }


def make_pair(entries: dict[str, list[Any]], draw: random.Random) -> Pair:
    """Draws a clause: a subject, a verb, an object, and sometimes a phrase with a number."""

    def phrase() -> list[Any]:
        adjectives = [draw.choice(entries["adjective"]) for _ in range(draw.choice([0, 0, 1, 1, 2]))]
        return [draw.choice(entries["determiner"]), *adjectives, draw.choice(entries["noun"])]

    def reordered(parts: list[Any]) -> list[Any]:
        return [parts[0], parts[-1], *parts[1:-1]]

    subject, thing, verb = phrase(), phrase(), draw.choice(entries["verb"])
    number = str(draw.randrange(2, 100))
    extra = [draw.choice(entries["preposition"]), ([number], [number]), draw.choice(entries["noun"])]
    extra = extra if draw.random() < 0.5 else []
    first = [*subject, verb, *thing, *extra]
    second = [*extra, *reordered(subject), *reordered(thing), verb]
    sources = {n: range(a, a + len(part[0])) for n, (part, a) in enumerate(zip(first, _starts(first, 0), strict=True))}
    order = _order(first, second)
    targets = [range(a, a + len(part[1])) for part, a in zip(second, _starts(second, 1), strict=True)]
    links = [link for n, own in zip(order, targets, strict=True) for link in itertools.product(sources[n], own)]
    return Pair([w for part in first for w in part[0]], [w for part in second for w in part[1]], sorted(links))


def _starts(parts: list[Any], side: int) -> list[int]:
    return [sum(len(part[side]) for part in parts[:n]) for n in range(len(parts))]


def _order(first: list[Any], second: list[Any]) -> list[int]:
    """Returns for each part of the target its number in the source; equal parts keep their order."""
    free = [*range(len(first))]
    order = []
    for part in second:
        number = next(n for n in free if first[n] is part)
        free.remove(number)
        order.append(number)
    return order


def estimated_links(folder: Path) -> list[str]:
    """Returns the links in which the forward and the backward alignment of eflomal agree, by training pair."""
    import eflomal  # only a program of this file needs it

    forward, backward = folder / "forward", folder / "backward"
    with (folder / "train.xx").open() as source, (folder / "train.yy").open() as target:
        eflomal.Aligner().align(source, target, str(forward), str(backward))
    lines = zip(forward.read_text().splitlines(), backward.read_text().splitlines(), strict=True)
    return [" ".join(sorted({*first.split()} & {*second.split()})) for first, second in lines]


def write_corpus(folder: Path) -> dict[str, list[Pair]]:
    """Writes the splits with their links, known (`gold`) and of eflomal (`eflomal`)."""
    draw = random.Random(1)
    entries = lexicon(draw)
    corpus = {split: [make_pair(entries, draw) for _ in range(size)] for split, size in SIZES.items()}
    for split, pairs in corpus.items():
        texts = {
            "xx": [" ".join(pair.source) for pair in pairs],
            "yy": [" ".join(pair.target) for pair in pairs],
            "gold": [format_links(tuple(pair.links)) for pair in pairs],
        }
        for end, lines in texts.items():
            _write(folder / f"{split}.{end}", lines)
    _write(folder / "train.eflomal", estimated_links(folder))
    return corpus


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def train_translator(folder: Path, name: str, links: str | None) -> tj.Run:
    """Trains a translator, with links if they are named, and returns the run."""
    weight, head = (0.5, 0) if links else (0.0, None)
    config = folder / f"{name}.py"
    config.write_text(CONFIG.format(name=name, links=links, steps=STEPS, weight=weight, head=head))
    train.main(["--config", str(config), "--data", str(folder), "--run", str(folder / "runs" / name)])
    return tj.load(folder / "runs" / name)


def rates(run: tj.Run, pairs: list[Pair]) -> dict[AlignmentHead, float]:
    """Returns the alignment error rates of all heads on pairs."""
    texts = [(" ".join(pair.source), " ".join(pair.target)) for pair in pairs]
    references = [read_links(format_links(tuple(pair.links))) for pair in pairs]
    return head_error_rates(run.tokenizers, texts, run.watch(texts), references)


def measure(run: tj.Run, corpus: dict[str, list[Pair]], guided: bool) -> dict[str, Any]:
    """Returns the error rates on the test pairs: of the default and the chosen head, and all; and BLEU."""
    chosen, test = next(iter(rates(run, corpus["validation"]))), rates(run, corpus["test"])
    layer = run.config.model.decoder_layers - 1
    default = AlignmentHead(layer, 0 if guided else None, "predicts")
    sources = [" ".join(pair.source) for pair in corpus["test"]]
    exact = sum(a == " ".join(b.target) for a, b in zip(run.translate(sources), corpus["test"], strict=True))
    return {
        "guided or default head": test[default],
        "chosen head": {"head": chosen._asdict(), "error_rate": test[chosen]},
        "heads": [{**head._asdict(), "error_rate": rate} for head, rate in test.items()],
        "exact matches": exact / len(sources),
    }


def with_marks(words: list[str], draw: random.Random) -> str:
    """Returns words with nested pairs of tags, single tags and placeholders at random places."""
    if not words:
        return ""
    text, start = [], 0
    while start < len(words):
        stop = draw.randint(start + 1, len(words))
        part = with_marks(words[start:stop], draw) if stop - start < len(words) else " ".join(words[start:stop])
        kind = draw.random()
        name = draw.choice(["b", "i", "a href='x y'", "g:x"])
        text.append(f"<{name}>{part}</{name.split()[0]}>" if kind < 0.4 else part)
        if kind > 0.8:
            text.append(draw.choice(["{0}", "{1}", "%s", "<br/>"]))
        start = stop
    return " ".join(text)


def check_markup(run: tj.Run, pairs: list[Pair]) -> dict[str, int]:
    """Returns what happened to the markup of `SEGMENTS` texts."""
    draw = random.Random(2)
    texts = [with_marks(pairs[n % len(pairs)].source, draw) for n in range(SEGMENTS)]
    counts: collections.Counter[str] = collections.Counter()
    for text, (output,) in zip(texts, run.outputs(texts, 1, markup="align"), strict=True):
        given, actual = (collections.Counter(MARK.findall(each)) for each in (text, output.text))
        ElementTree.fromstring(f"<r xmlns:g='g'>{output.text}</r>")  # raises if it is not well-formed
        counts += collections.Counter(
            {
                "marks": given.total(),
                "lost": (given - actual).total(),
                "invented": (actual - given).total(),
                "segments that keep all": output.placeholders_kept,
            }
        )
    return {"segments": len(texts), "lost": 0, "invented": 0, **counts}


def main() -> None:
    """Trains, measures, prints and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus = write_corpus(folder)
        gold = [read_links(format_links(tuple(pair.links))) for pair in corpus["train"]]
        estimated = [read_links(line).sure for line in (folder / "train.eflomal").read_text().splitlines()]
        actual: dict[str, Any] = {"eflomal on the training pairs": error_rate(estimated, gold)}
        for name, links in (("unguided", None), ("guided by eflomal", "eflomal"), ("guided by known links", "gold")):
            run = train_translator(folder, name.replace(" ", "_"), links)
            actual[name] = measure(run, corpus, guided=links is not None)
            shown = {key: value for key, value in actual[name].items() if key != "heads"}
            print(name, shown, flush=True)
        markup = check_markup(run, corpus["test"])
    print(actual["eflomal on the training pairs"], markup)
    assert markup["lost"] == markup["invented"] == 0
    if options.record:
        commands.write_record(options.record, "tests.programs.alignments", error_rates=actual, markup=markup)


if __name__ == "__main__":
    main()
