"""Files read in blocks have the examples and the counts of a plain loop over their lines."""

import collections
import gzip
import random

import pytest

from tformer_jax.base.user_cache import VARIABLE
from tformer_jax.config import Config, DataConfig, FilterConfig, ModelConfig
from tformer_jax.data.corpora import DataError, blocks, load_corpus, stored

TEXTS = (
    "a",
    "Wort 7",
    "中文",
    "\u2800",
    "\u00a0x",
    "'quoted'",
    "\ufeffa",
    "e\u0301",
    "\u0301",
    "a\x0bb",
    "a\x85b",
    "\U0001f600",
)
BLANK = {"\u2800", "\u0301"}
ODD = (
    b"",
    b" ",
    b"\t",
    b"a\t",
    b"\ta",
    b"a\tb\tc",
    b"a",
    b"\xff\tb",
    b"a\r\tb",
    b"a\tb\r",
    b"\xed\xa0\x80\tb",
    b"\xe3\x80\x80\t ",
    b"a\t ",
    b"a\tb\r\r",
)


def draw_lines(rng, odd):
    """Draws lines without ends; `odd` is the share of those that are no pairs, or need care."""
    pairs = (
        "\t".join(rng.choices(TEXTS[:3] if odd < 0.5 else TEXTS, k=2)).encode() for _ in range(rng.randrange(1, 40))
    )
    return [rng.choice(ODD) if rng.random() < odd else line for line in pairs]


def is_blank(text):
    return not text.strip() or text in BLANK


def expect_pairs(content, header):
    """Returns the pairs of a file and the number of other lines by their kind, by a loop."""
    pairs, counts = [], collections.Counter()
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines):
        try:
            text = line.decode("utf-8-sig" if number == 0 else "utf-8").removesuffix("\r")
        except UnicodeDecodeError:
            counts["bad"] += 1
            text = None
        if number == 0 and header:
            counts["header lines"] += text is not None
        elif text is not None and not text.strip():
            counts["blank lines"] += 1
        elif text is not None and text.count("\t") != 1:
            counts["bad"] += 1
        elif text is not None:
            source, target = text.split("\t")
            if is_blank(source) or is_blank(target):
                counts["blank texts"] += 1
            else:
                pairs.append({"source": source, "target": target})
    return pairs, counts


def counted(left_out):
    kinds = {"header lines", "blank lines", "blank texts"}
    counts = collections.Counter()
    for name, count in left_out.items():
        counts[name if name in kinds else "bad"] += count
    return counts


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_tab_separated_pairs_are_those_of_a_loop(seed, large, tmp_path, monkeypatch):
    rng = random.Random(seed)
    lines = [
        rng.choice([b"first\tline", b"\xff\tline"]),
        *draw_lines(rng, rng.choice([0.0, 0.05, 0.6])),
        rng.choice([b"last\tline", b"last\tline\r"]),
    ]
    content = rng.choice([b"\n", b"\n", b"\r\n"]).join(lines) + rng.choice([b"", b"\n", b"\r\n"])
    content, header = rng.choice([b"", b"\xef\xbb\xbf"]) + content, rng.random() < 0.3
    (tmp_path / "train.tsv").write_bytes(content)
    (tmp_path / "dev.tsv").write_text("x\ty\nx\ty\n")
    monkeypatch.setattr(blocks, "LINES", rng.choice([1, 3, 7, 1_000]))
    monkeypatch.setattr(blocks, "BYTES", rng.choice([20, 2**20]))
    monkeypatch.setattr(blocks, "FEW", rng.choice([0, 16]))
    if large:
        monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
        monkeypatch.setattr(stored, "LARGE", 1)
        monkeypatch.setattr(stored, "ROWS", rng.choice([2, 5, 100]))
    data = DataConfig(source="tsv", train=("train.tsv",), validation=("dev.tsv",), header=header, on_bad_line="skip")
    corpus = load_corpus(Config(data=data), tmp_path)
    pairs, counts = expect_pairs(content, header)
    assert isinstance(corpus.train, stored.Stored) == large
    assert (list(corpus.train), counted(corpus.left_out["train"])) == (pairs, counts)
    assert [corpus.train[index] for index in range(len(corpus.train))] == pairs


@pytest.mark.parametrize("seed", range(20))
def test_aligned_lines_are_those_of_a_loop(seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    files = [[rng.choice([b"a b", "中文".encode(), b"a\tb", b"\xff", b" ", b"c\r"]) for _ in range(30)] for _ in "ab"]
    files = [[*lines, b"end"] for lines in files]
    for name, lines in zip(("en", "de"), files, strict=True):
        (tmp_path / f"train.{name}").write_bytes(b"\n".join(lines) + rng.choice([b"", b"\n"]))
    monkeypatch.setattr(blocks, "LINES", rng.choice([1, 4, 10, 1_000]))
    data = DataConfig(
        source="parallel_lines", train=("train.{lang}",), validation=("train.{lang}",), on_bad_line="skip"
    )
    corpus = load_corpus(Config(data=data), tmp_path)
    valid = [texts for texts in zip(*files, strict=True) if b"\xff" not in texts]
    decoded = [[text.decode().removesuffix("\r") for text in texts] for texts in valid]
    pairs = [dict(zip(("source", "target"), texts, strict=True)) for texts in decoded if all(map(str.strip, texts))]
    assert list(corpus.train) == pairs
    assert corpus.left_out["train"].get("blank texts", 0) == len(valid) - len(pairs)


@pytest.mark.parametrize("size", [3, 4, 7, 8, 9])
def test_the_line_without_a_partner_is_named(size, tmp_path, monkeypatch):
    """Blocks that end with a file, before it and after it."""
    monkeypatch.setattr(blocks, "LINES", 4)
    (tmp_path / "train.en").write_text("a\n" * size)
    (tmp_path / "train.de").write_text("b\n" * (size + 1))
    data = DataConfig(source="parallel_lines", train=("train.{lang}",), validation=("train.{lang}",))
    with pytest.raises(DataError, match=rf"train\.de, line {size + 1}: has no partner, .*ends after {size} lines"):
        load_corpus(Config(data=data), tmp_path)


def test_lines_before_the_end_of_a_truncated_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "LINES", 100)
    texts = [f"{random.Random(number).random()}" for number in range(1_050)]
    content = gzip.compress("".join(f"{text}\n" for text in texts).encode())
    (tmp_path / "train.txt.gz").write_bytes(content[: len(content) - 200])
    data = DataConfig(
        source="lines", train=("train.txt.gz",), validation=("train.txt.gz",), on_bad_line="skip", batching="windows"
    )
    cfg = Config(data=data, model=ModelConfig(family="decoder_lm"))
    read = [example["text"] for example in load_corpus(cfg, tmp_path).train]
    assert 500 < len(read) < 1_050
    assert read == texts[: len(read)]


def test_columns_are_those_that_settings_name(tmp_path, monkeypatch):
    """The first line has the number of columns; others are malformed."""
    monkeypatch.setattr(blocks, "LINES", 2)
    (tmp_path / "train.tsv").write_text("id\ten\tde\n1\ta\tb\n2\tc\td\textra\n3\te\tf\n\t\t\n4\tg\th\n5\ti\tj\n")
    data = DataConfig(source="tsv", train=("train.tsv",), validation=("train.tsv",), on_bad_line="skip", header=True)
    for fields in (("de", "en"), ("3", "2")):
        corpus = load_corpus(Config(data=DataConfig(**vars(data) | {"fields": fields})), tmp_path)
        assert [(each["source"], each["target"]) for each in corpus.train] == [*map(tuple, ("ba", "fe", "hg", "ji"))]
        assert counted(corpus.left_out["train"]) == {"bad": 1, "blank lines": 1, "header lines": 1}


def test_other_filters_see_all_examples(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "LARGE", 1)
    monkeypatch.setattr(blocks, "LINES", 2)
    (tmp_path / "train.tsv").write_text("a\tb\nc\tc\na\tb\nd\te\na\tb\n")
    filters = FilterConfig(duplicates=True, identical_sides=True)
    data = DataConfig(source="tsv", train=("train.tsv",), validation=("train.tsv",), filters=filters)
    corpus = load_corpus(Config(data=data), tmp_path)
    assert [*map(tuple, map(dict.values, corpus.train))] == [("a", "b"), ("d", "e")]
    assert corpus.left_out["train"] == {"duplicates": 2, "identical sides": 1}
