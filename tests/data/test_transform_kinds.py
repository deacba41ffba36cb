"""Each transform: by hand with scripted draws, and against plain Python on random texts."""

import collections
import itertools
import random
import re

import numpy as np
import pytest

from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig
from tformer_jax.config.transforms import Transform
from tformer_jax.data.corpora import Corpus, Joined
from tformer_jax.data.placeholders import NUMBERED
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import ByteTokenizer
from tformer_jax.data.transforms.base import Training
from tformer_jax.data.transforms.noise import KEYS

YES, NO = 0.0, 0.999
draw = random.Random(0)
TEXTS = [
    " ".join("".join(draw.choices("abcdeF,.", k=draw.randint(1, 7))) for _ in range(draw.randint(1, 9)))
    for _ in range(300)
]


class Scripted(random.Random):
    """Draws what it is given, in order: numbers below 1, and indices of choices and ranges."""

    def __init__(self, *draws):
        super().__init__(0)
        self.left = list(draws)

    def random(self):
        return self.left.pop(0)

    def choice(self, values):
        return values[self.left.pop(0)]

    def randrange(self, start, stop=None):
        value = self.left.pop(0)
        assert value in (range(start) if stop is None else range(start, stop))
        return value

    def randint(self, low, high):
        return self.randrange(low, high + 1)


def prepared(kind, pairs=(), sizes=None, root=None, data=None, tokenizers=None, **settings):
    """Returns the change of a transform for some pairs, of which `sizes` are those of the entries."""
    data = DataConfig(**{"source": "tsv", "train": "x", "transforms": ({"kind": kind, **settings},), **(data or {})})
    train = list(pairs)
    if sizes:
        ends = [0, *itertools.accumulate(sizes)]
        train = Joined([train[start:stop] for start, stop in itertools.pairwise(ends)])
    own = ByteTokenizer().with_symbols(data.symbols, data.placeholders)
    tokenizers = tokenizers or Tokenizers(own, own)
    return data.transforms[0].prepare(Training(data, Corpus(train, [], [], root=root), tokenizers))


def changed(kind, text, *draws, **settings):
    """Returns a changed source, given all draws of the transform."""
    rng = Scripted(*draws)
    data = settings.pop("data", None)
    result = prepared(kind, data=data, **settings)({"source": text, "target": text}, rng, 0)
    assert not rng.left
    assert result["target"] == text
    return result["source"]


@pytest.mark.parametrize(
    ("kind", "text", "draws", "settings", "expected"),
    [
        ("case", "Das ist ß", (), {"sides": ("source",)}, "DAS IST SS"),
        ("case", "das ist", (), {"sides": ("source",), "form": "title"}, "Das Ist"),
        (
            *("case", "the dog's 3rd bone isn't (as “well-known”) McDonald", ()),
            {"sides": ("source",), "form": "title"},
            "The Dog's 3rd Bone Isn't (As “Well-Known”) McDonald",
        ),
        ("case", "DAS Ist", (), {"sides": ("source",), "form": "lower"}, "das ist"),
        ("spacing", "one two six", (YES, 0, NO, NO), {}, "onetwo six"),
        ("spacing", "one two six", (NO, YES, 1, 1, NO), {}, "one tw o six"),
        ("spacing", "bus 12 30 1.50", (YES, 0, YES, 0, YES, 0, YES, 0), {}, "bus12 30 1.50"),
        ("spacing", "1250 3:30 b2b", (YES, 1, YES, 1, YES, 1), {}, "1250 3:30 b2b"),
        ("spacing", "one two", (YES, 0, NO), {"changes": ("double",)}, "one  two"),
        ("spacing", "a b", (YES, 1, YES, 0), {}, "a b"),
        ("punctuation", "a, b. c+", (YES, 0, YES, 1), {}, "a b.. c+"),
        ("punctuation", "a, b", (NO,), {}, "a, b"),
        ("punctuation", "1.50 at 3:30, -5 a!", (YES, 0), {}, "1.50 at 3:30, -5 a"),
        ("typos", "word a1 two", (YES, 0, 1, NO), {}, "wrod a1 two"),
        ("typos", "word two", (YES, 1, 3, NO), {}, "wor two"),
        ("typos", "word two", (NO, YES, 2, 0), {}, "word ttwo"),
        ("typos", "Word", (YES, 3, 0, 1), {}, "Eord"),
        ("typos", "яме", (YES, 3, 0, 2), {}, "еме"),
        ("word_dropout", "one two  six", (NO, YES, NO), {}, "one  six"),
        ("word_dropout", "one two", (YES, NO), {}, "two"),
        ("word_dropout", " one ", (YES, 0), {}, " one "),
        ("word_swap", " one two\n", (0.9, 0.0), {"distance": 1}, " two one\n"),
        ("word_dropout", "one two", (YES, YES, 1), {}, "two"),
        ("word_swap", "one two  six", (0.9, 0.0, 0.0), {"distance": 1}, "two one  six"),
        ("word_swap", "a b c d", (0.6, 0.0, 0.0, 0.0), {"distance": 3}, "b c a d"),
    ],
)
def test_by_hand(kind, text, draws, settings, expected):
    assert changed(kind, text, *draws, **settings) == expected


def edits(word: str) -> set[str]:
    """Returns all words that are one edit away: a swap, a removed, repeated or other letter."""
    places = range(len(word))
    others = {*word.lower(), *"".join(KEYS)}
    others |= {letter.upper() for letter in others}
    return {
        *(word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]),
        *(word[:i] + word[i + 1 :] for i in places),
        *(word[: i + 1] + word[i:] for i in places),
        *(word[:i] + other + word[i + 1 :] for i in places for other in others),
    }


def test_typos_are_one_edit_of_a_share_of_the_words():
    """A swap of equal letters changes nothing: about one in six of the swaps, which are a quarter."""
    typos, rng, counts = prepared("typos", rate=0.3), random.Random(1), collections.Counter()
    for text in TEXTS * 5:
        before, after = (
            re.findall(r"[a-zA-Z]+|[^a-zA-Z]+", t) for t in (text, typos({"source": text}, rng, 0)["source"])
        )
        for word, actual in zip(before, after, strict=True):
            assert actual == word or (len(word) > 1 and actual in edits(word))
            counts.update(all=len(word) > 1 and word.isalpha(), changed=actual != word)
    assert abs(counts["changed"] / counts["all"] - 0.3 * (1 - 1 / 24)) < 0.02


@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_spaces_and_marks_change_alone(rate):
    rng = random.Random(2)
    spacing, punctuation = prepared("spacing", rate=rate), prepared("punctuation", rate=rate)
    for text in TEXTS:
        assert spacing({"source": text}, rng, 0)["source"].replace(" ", "") == text.replace(" ", "")
        actual = punctuation({"source": text}, rng, 0)["source"]
        assert re.sub(r"[.,]", "", actual) == re.sub(r"[.,]", "", text)
        if rate == 1:
            assert not re.search(r"(?<![.,])([.,])(?!\1)(?![.,])", actual), "each mark is removed or repeated"


def test_dropped_words_leave_the_others_in_order():
    dropout, rng, counts = prepared("word_dropout", rate=0.4), random.Random(3), collections.Counter()
    for text in TEXTS:
        words, actual = text.split(), dropout({"source": text}, rng, 0)["source"].split()
        remaining = iter(words)
        assert actual
        assert all(word in remaining for word in actual)
        if len(words) > 6:
            counts.update(all=len(words), dropped=len(words) - len(actual))
    assert abs(counts["dropped"] / counts["all"] - 0.4) < 0.05


def test_swapped_words_move_at_most_by_the_distance_and_everywhere_within():
    """With the distance 1, the orders are those in which disjoint neighbors are swapped."""
    swap, rng = prepared("word_swap", distance=1), random.Random(4)
    orders = {swap({"source": "0 1 2 3"}, rng, 0)["source"] for _ in range(500)}
    assert orders == {"0 1 2 3", "1 0 2 3", "0 2 1 3", "0 1 3 2", "1 0 3 2"}
    for text in TEXTS:
        words = [f"{place}" for place in range(len(text))]
        actual = prepared("word_swap", distance=4)({"source": " ".join(words)}, rng, 0)["source"].split()
        assert sorted(actual) == sorted(words)
        assert all(abs(place - int(word)) <= 4 for place, word in enumerate(actual))


def test_symbols_and_placeholders_stay_whole():
    data = {"symbols": ("<br>",), "placeholders": ("percent", "braces")}
    text = "say %(name)s to {user name}<br>abc"
    for kind, settings in {"case": {}, "typos": {"rate": 1.0}, "word_swap": {"distance": 9}}.items():
        for seed in range(20):
            change = prepared(kind, data=data, **settings)
            actual = change({"source": text, "target": text}, random.Random(seed), 0)["source"]
            assert all(part in actual for part in ("%(name)s", "<br>"))
    assert changed("case", text, data=data, sides=("source",)) == "SAY %(name)s TO {USER NAME}<br>ABC"


def test_noise_of_words_leaves_symbols_and_placeholders_where_they_are():
    data = {"symbols": ("<br>",), "placeholders": ("braces",)}
    draws = (NO, YES, YES, YES, YES)
    assert changed("word_dropout", "a b {0} <br> c", *draws, data=data) == "a {0} <br>"
    settings = {"data": data, "distance": 9}
    swap, text = prepared("word_swap", **settings), "a b c <br> {0}, {1} <br> d e f"
    orders = {swap({"source": text}, random.Random(seed), 0)["source"] for seed in range(300)}
    sides = ([" ".join(words) for words in itertools.permutations(side)] for side in ("abc", "def"))
    assert orders == {" <br> {0}, {1} <br> ".join(pair) for pair in itertools.product(*sides)}


def test_private_use_characters_of_a_text_stay():
    data = {"symbols": ("<br>",)}
    assert changed("case", "\U00100000 a <br> b", data=data, sides=("source",)) == "\U00100000 A <br> B"


def test_texts_of_documents_are_changed_and_labels_are_not():
    upper = prepared("case")
    assert upper({"text": "ab", "label": "x"}, Scripted(), 0) == {"text": "AB", "label": "x"}
    example = {"source": "ab", "target": "ab", "direction": "en-de"}
    assert upper(example, Scripted(), 0) == {"source": "AB", "target": "AB", "direction": "en-de"}


GLOSSARY = [
    *(("cat", "Katze"), ("black cat", "schwarze Katze"), ("can't", "kann nicht"), ("sat", "saß", "setzte")),
    *(("a b c", "x"), ("C++", "C plus"), (".NET", "Punktnetz"), ("U.S.", "USA"), ("C", "Buchstabe"), ("cat", "Kater")),
]
FIXED = ("{cat}", "<cat>", "<b>")


def hints_of(source: str, target: str) -> str:
    """Replaces terms with hints by one regular expression, the longest first, between symbols and placeholders."""
    terms: dict[str, list[str]] = {}
    for term, *translations in GLOSSARY:
        terms.setdefault(term, []).extend(translations)
    ordered = sorted(terms, key=len, reverse=True)
    pattern = re.compile("|".join(re.sub(r"^(?=\w)|(?<=\w)$", r"\\b", re.escape(term)) for term in ordered))

    def hint(match):
        translation = next((text for text in terms[match[0]] if text in target), None)
        return match[0] if translation is None else f"{match[0]} <hint> {translation} </hint>"

    parts = re.split(f"({'|'.join(FIXED)})", source)
    return "".join(part if part in FIXED else pattern.sub(hint, part) for part in parts)


def test_terms_get_hints_as_by_a_regular_expression(tmp_path):
    (tmp_path / "terms.tsv").write_text("".join("\t".join(line) + "\n" for line in GLOSSARY), encoding="utf-8")
    data = {"symbols": ("<hint>", "</hint>", "<cat>"), "placeholders": ("braces", "tags")}
    change = prepared("terminology", root=tmp_path, data=data, glossary="terms.tsv", rate=1.0)
    rng, words = random.Random(5), ["the", "black", "cat", "cats", "can't", "sat", "a", "b", "c", ",", "xcat", *FIXED]
    words += ["C++", "C+++", "C", ".NET", "x.NET", ".NETS", "U.S.", "U.S"]
    for _ in range(500):
        source = " ".join(rng.choices(words, k=rng.randint(1, 8)))
        target = " ".join(rng.choice(line[1:]) for line in rng.sample(GLOSSARY, 4))
        result = change({"source": source, "target": target}, rng, 0)
        assert result == {"source": hints_of(source, target), "target": target}
    some = prepared("terminology", root=tmp_path, data=data, glossary="terms.tsv")
    pair = {"source": "cat sat", "target": "Katze saß"}
    assert some(pair, Scripted(NO, YES), 0)["source"] == "cat sat <hint> saß </hint>"


def test_terms_beside_placeholders_and_in_scripts_without_spaces(tmp_path):
    (tmp_path / "terms.tsv").write_text("file\tDatei\n猫\tKatze\nsee {url}\tsiehe\nमत\tVotum\n", encoding="utf-8")
    data = {"symbols": ("<hint>", "</hint>"), "placeholders": ("braces", "urls")}
    change = prepared("terminology", root=tmp_path, data=data, glossary="terms.tsv", rate=1.0)
    for source, target, expected in [
        ("Delete file {file}?", "Datei {file} löschen?", "Delete file <hint> Datei </hint> {file}?"),
        ("http://a/file file", "http://a/file Datei", "http://a/file file <hint> Datei </hint>"),
        ("我喜欢猫。", "Ich mag die Katze.", "我喜欢猫 <hint> Katze </hint>。"),
        ("see {url}", "siehe {url}", "see {url} <hint> siehe </hint>"),
        ("मत कीमत", "Votum", "मत <hint> Votum </hint> कीमत"),
        ("the file", "Dateien", "the file"),  # another word
    ]:
        assert change({"source": source, "target": target}, random.Random(0), 0)["source"] == expected


def test_terms_with_other_white_space(tmp_path):
    (tmp_path / "terms.tsv").write_text("red car\trotes Auto\nbig\u00a0dog\tgroßer  Hund\n", encoding="utf-8")
    data = {"symbols": ("<hint>", "</hint>")}
    sources = ["a red car", "a red  car", "a red\u00a0car", "a re\u00add car"]
    for clean, hinted in ((None, 4), (False, 1)):
        change = prepared(
            "terminology", root=tmp_path, data={**data, "clean_whitespace": clean}, glossary="terms.tsv", rate=1.0
        )
        pairs = [{"source": source, "target": "ein rotes Auto"} for source in sources]
        actual = [change(pair, random.Random(0), 0)["source"] for pair in pairs]
        assert actual == ["a red car <hint> rotes Auto </hint>"] * hinted + sources[hinted:]
    actual = change({"source": "big dog", "target": "großer Hund"}, random.Random(0), 0)["source"]
    assert actual == "big dog <hint> großer Hund </hint>"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("terminology", {"glossary": "g"}),
        ("fuzzy_matches", {}),
        ("entry_tags", {"tags": ("<bt>",)}),
        ("concatenation", {"separator": " <br> "}),
    ],
)
def test_marks_that_loaded_tokenizers_read_as_placeholders_are_refused(kind, settings):
    loaded = ByteTokenizer().with_symbols(NUMBERED, ("tags",))
    data = {"tokenizer": "file", "tokenizer_file": "a.json"}
    with pytest.raises(UserError, match=rf"{kind}.*: '</?\w+>' is a placeholder for the tokenizers, and none of their"):
        prepared(kind, data=data, tokenizers=Tokenizers(loaded, loaded), **settings)


def test_symbols_of_loaded_tokenizers_stay_whole():
    loaded = ByteTokenizer().with_symbols(("<br>", *NUMBERED), ("braces",))
    upper = prepared(
        "case", data={"tokenizer": "file", "tokenizer_file": "a.json"}, tokenizers=Tokenizers(loaded, loaded)
    )
    assert upper({"source": "a <br> {b}", "target": ""}, Scripted(), 0)["source"] == "A <br> {b}"


def test_entries_of_datasets_are_not_told_apart():
    tags = {"kind": "entry_tags", "tags": ("", "<bt>")}
    with pytest.raises(
        UserError, match="tags.*: needs data.weights or data.stages, which tell the examples of entries"
    ):
        DataConfig(source="tfds", dataset="x", train=("a", "b"), symbols=("<bt>",), transforms=(tags,))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        (" \n", "terms.tsv is empty"),
        ("cat\tKatze\ncat", "line 2 of glossary .* must be a term, a tab and its translation: 'cat'"),
    ],
)
def test_a_malformed_glossary_is_named(content, problem, tmp_path):
    if content is not None:
        (tmp_path / "terms.tsv").write_text(content)
    with pytest.raises(UserError, match=problem):
        prepared("terminology", root=tmp_path, data={"symbols": ("<hint>", "</hint>")}, glossary="terms.tsv")


def similarity(a: str, b: str) -> float:
    first, second = ({*re.findall(r"\w+|[^\w\s]", text.lower())} for text in (a, b))
    return 2 * len(first & second) / (len(first) + len(second))


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 1.0])
def test_matches_are_those_of_an_exhaustive_search(threshold):
    words = [*"abcdefghijkl", "."]
    pairs = [{"source": " ".join(draw.choices(words, k=draw.randint(1, 6))), "target": str(n)} for n in range(200)]
    data = {"symbols": ("<match>",)}
    change = prepared("fuzzy_matches", pairs, data=data, similarity=threshold)
    matched = 0
    for index, pair in enumerate(pairs):
        scores = [similarity(pair["source"], other["source"]) for other in pairs]
        scores = [s if other["source"] != pair["source"] else 0 for s, other in zip(scores, pairs, strict=True)]
        best = int(np.argmax(scores))
        expected = f"{pairs[best]['target']} <match> {pair['source']}" if scores[best] >= threshold else pair["source"]
        assert change(pair, Scripted(), index) == {**pair, "source": expected}
        matched += scores[best] >= threshold
    assert matched > 10


def test_a_match_is_that_of_the_source_as_it_is_read_and_never_its_own_translation():
    pairs = [{"source": "a b c", "target": "1"}, {"source": "a b d", "target": "2"}, {"source": "a b c", "target": "3"}]
    change = prepared("fuzzy_matches", pairs, data={"symbols": ("<match>",)})
    assert change({"source": "A B C", "target": "1"}, Scripted(), 0)["source"] == "2 <match> A B C"


def test_a_source_with_other_white_space_is_no_match():
    pairs = [{"source": source, "target": "1"} for source in ("a b c", "a  b c ", "\u200ba b\u00a0c")]
    change = prepared("fuzzy_matches", [*pairs, {"source": "a b d", "target": "2"}], data={"symbols": ("<match>",)})
    assert [change(pair, Scripted(), index)["source"][0] for index, pair in enumerate(pairs)] == ["2", "2", "2"]


def test_examples_are_joined_with_the_next_or_others_of_their_entry():
    pairs = [{"source": f"s{n}", "target": f"t{n}"} for n in range(6)]
    settings = {"data": {"symbols": ("|",)}, "separator": " | ", "count": 3, "sizes": (4, 2)}
    following = prepared("concatenation", pairs, **settings)
    for index in range(6):
        for count in (2, 3):
            stop = 4 if index < 4 else 6
            joined = range(index, min(index + count, stop))
            actual = following(pairs[index], Scripted(count), index)
            assert actual == {key: " | ".join(f"{key[0]}{n}" for n in joined) for key in ("source", "target")}
    others = prepared("concatenation", pairs, others="random", **settings)
    assert others(pairs[5], Scripted(3, 4, 5), 5)["source"] == "s5 | s4 | s5"
    assert others(pairs[0], Scripted(2, 3), 0)["target"] == "t0 | t3"
    with pytest.raises(AssertionError):
        others(pairs[5], Scripted(2, 3), 5)  # of the other entry
    short = prepared("concatenation", pairs, max_characters=6, **settings)
    assert short(pairs[0], Scripted(3), 0)["source"] == "s0"
    documents = prepared("concatenation", [{"text": "a"}, {"text": "b"}])
    assert documents({"text": "a"}, Scripted(2), 0) == {"text": "a b"}


def test_sources_have_the_tag_of_their_entry():
    pairs = [{"source": f"s{n}", "target": f"t{n}"} for n in range(5)]
    data = {"train": ("clean", "back"), "validation": "v", "weights": (1, 1), "symbols": ("<bt>", "<hq>")}
    tag = prepared("entry_tags", pairs, (2, 3), data=data, tags=("", "<bt>"))
    assert [tag(pair, Scripted(), n)["source"] for n, pair in enumerate(pairs)] == [
        "s0",
        "s1",
        "<bt>s2",
        "<bt>s3",
        "<bt>s4",
    ]
    transform = Transform.from_value({"kind": "entry_tags", "tags": ("<hq>", "<bt>"), "held_out": "<hq>"})
    assert [transform.format_source(text) for text in ("a", "<bt>a", "<hq>a")] == ["<hq>a", "<bt>a", "<hq>a"]
