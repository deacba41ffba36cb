"""Alignments of words against attention weights and tokens, and the choice of a head."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.helpers import rest_slow
from tests.inference.test_final_texts import DECODINGS, SOURCE, TAGS, TARGET, TEXTS, TOKENIZERS, config, model, outputs
from tformer_jax.base.errors import UserError
from tformer_jax.config import DataConfig, DecodeConfig
from tformer_jax.config.decode import AlignmentHead
from tformer_jax.data.placeholders import NUMBERED
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.data.tokenizers.simple import CharacterTokenizer, WordTokenizer
from tformer_jax.data.word_links import error_rate, read_links
from tformer_jax.inference.alignment import head_error_rates, word_links, written_ranges
from tformer_jax.inference.engine import Engine, Request
from tformer_jax.inference.text import Translator
from tformer_jax.inference.watch import watch, without_padding
from tformer_jax.models.seq2seq import Seq2Seq
from tformer_jax.runs import run_folder
from tformer_jax.special_tokens import BOS, EOS

__all__ = ["model"]


def expected_links(model, params, text, ids, layer=-1, head=None, query="predicts"):
    """Returns the links of an output of words: of each token with the word that has most of its weights."""
    source = SOURCE.special.wrap_side(SOURCE.encode(text))
    batch = {"source": np.array([source]), "target_in": np.array([[BOS, *ids[:-1]]])}
    weights = np.asarray(watch(model, params, batch).weights["cross"])[0, layer]
    weights = weights.mean(axis=0) if head is None else weights[head]
    places = [t for t, i in enumerate(ids) if TARGET.decode([i], unknown="<unk>")]
    rows = [min(t + (query == "reads"), len(ids) - 1) for t in places]
    return tuple(sorted((int(weights[row, : len(text.split())].argmax()), word) for word, row in enumerate(rows)))


ATTENTIONS = {"beam": (1, 1, "reads"), "greedy": (None, None, "predicts"), "sample": (0, 2, "reads")}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", rest_slow([*ATTENTIONS], 1))
def test_every_output_is_aligned_by_the_weights_of_the_head(model, strategy):
    layer, head, query = ATTENTIONS[strategy]
    named = {"alignment_layer": layer, "alignment_head": head, "alignment_query": query}
    decode = dataclasses.replace(DECODINGS[strategy], alignments=True, **named)
    plain = outputs(*model, DECODINGS[strategy])
    assert len(plain) == len(TEXTS) * (1 if strategy == "greedy" else 2)
    for key, (text, ids, last) in outputs(*model, decode).items():
        assert (text, ids) == plain[key][:2]
        assert plain[key][2].alignment is None
        layer_read = -1 if layer is None else layer
        assert last.alignment == expected_links(*model, TEXTS[key[0]], ids, layer_read, head, query)


@pytest.mark.slow
def test_translations_have_alignments_also_with_copied_words_and_blank_texts(model):
    decode = dataclasses.replace(DECODINGS["greedy"], alignments=True, unknown="copy")
    translate = Translator(config(decode, model[0]), model[0], TOKENIZERS)
    *actual, blank = translate.outputs(model[1], [*TEXTS, " "])
    assert (blank.text, blank.alignment) == ("", ())
    for output, text in zip(actual, TEXTS, strict=True):
        assert {target for _, target in output.alignment} == {*range(len(output.text.split()))}
        assert all(0 <= source < len(text.split()) for source, _ in output.alignment)
    pieces = [*translate.stream_pieces(model[1], TEXTS[0])]
    assert pieces[-1].alignment == actual[0].alignment


def test_tokens_write_words():
    """Each token writes characters; a word has those tokens that write one of its own."""
    text, spans = "ab cd", [(0, 2), (3, 5)]
    for count in range(1, 6):
        for cuts in itertools.combinations_with_replacement(range(6), count - 1):
            ends = [0, *cuts, 5]
            written = [{*range(ends[n], ends[n + 1])} for n in range(count)]
            actual = written_ranges(text, [text[:cut] for cut in cuts], spans)
            for part, span in zip(actual, spans, strict=True):
                own = [n for n, characters in enumerate(written) if characters & {*range(*span)}]
                assert (part[0], part[-1]) == (own[0], own[-1])
    # bytes of a character that is not complete, and a text that is written otherwise at its end
    assert written_ranges("a é", ["a", "a \ufffd"], [(0, 1), (2, 3)]) == [range(1), range(2, 3)]
    assert written_ranges("don't", ["do", "do n"], [(0, 5)]) == [range(3)]


def test_links_of_words_are_those_of_their_tokens():
    weights = np.array([[0.4, 0.35, 0.25], [0.1, 0.2, 0.7], [0.2, 0.5, 0.3], [0.9, 0.05, 0.05]])
    source = [range(1), range(1, 3)]
    # tokens 0 to 2 attend most to both tokens of word 1 together, token 3 to word 0
    assert word_links(weights, source, [range(1), range(1, 4)]) == ((0, 1), (1, 0), (1, 1))
    assert word_links(weights, [], [range(1)]) == ()
    assert word_links(weights, source, []) == ()


@pytest.mark.slow
def test_heads_are_ranked_by_their_error_rates(model):
    pairs = [("a b c", "T U"), ("d Zebra", "V W X")]
    references = [read_links("0-0 2-1"), read_links("0-0 1-1 1p2")]

    def watched():
        for source, target in pairs:
            rows = {
                "source": SOURCE.special.wrap_side(SOURCE.encode(source)),
                "target_in": [BOS, *TARGET.encode(target)],
            }
            actual = watch(*model, {key: np.array([ids]) for key, ids in rows.items()})
            single = jax.tree.map(lambda x: np.asarray(x)[0], actual)
            yield without_padding(single, Seq2Seq, {key: len(ids) for key, ids in rows.items()})

    rates = head_error_rates(TOKENIZERS, pairs, watched(), references)
    assert len(rates) == 2 * (4 + 1) * 2
    assert [*rates.values()] == sorted(rates.values())
    for (layer, head, query), rate in rates.items():
        ids = [[*TARGET.encode(target), EOS] for _, target in pairs]
        links = [
            expected_links(*model, source, own, layer, head, query) for (source, _), own in zip(pairs, ids, strict=True)
        ]
        assert rate == pytest.approx(error_rate(links, references))


@pytest.mark.parametrize("cut", [0, 1])
def test_heads_are_ranked_on_pairs_with_placeholders(cut):
    """By a head that attends as the reference says, of a target with a placeholder that its source lacks.

    The end of a target that fills the model is cut.
    """
    source = WordTokenizer(["a", "b"]).with_symbols(NUMBERED, ("braces",))
    target = CharacterTokenizer([*"{}yTU "]).with_symbols(NUMBERED, ("braces",))
    written = f"{{y}}T {NUMBERED[0]} U"
    ids = source.special.wrap_side(source.encode(f"a {NUMBERED[0]} b")), [BOS, *target.encode(written)]
    words = [written[: place + 1].count(" ") for place in range(len(written))]
    weights = np.eye(4)[[*words, 3]]  # each token attends to the word of the source with its word's number
    watched = SimpleNamespace(
        tokens={"source": np.array(ids[0]), "target_in": np.array(ids[1][: len(weights) - cut])},
        weights={"cross": weights[None, None, : len(weights) - cut]},
    )
    pairs, references = [("a {x} b", "{y}T {x} U")], [read_links("0-0 1-1 2-2")]
    rates = head_error_rates(Tokenizers(source, target), pairs, [watched], references)
    assert rates[AlignmentHead(0, 0, "predicts")] == 0


@pytest.mark.slow
def test_alignments_are_of_the_words_after_the_tag_of_a_format(model):
    """Outputs, and the choice of a head, against the weights of the words."""
    tokenizers = Tokenizers(WordTokenizer(["a", "b", "c"]).with_symbols(("<hq>", "<bt>")), TARGET)
    files = {"source": "tsv", "train": ("x", "y"), "validation": "z", "weights": (1, 1), "symbols": ("<bt>", "<hq>")}
    cfg = config(dataclasses.replace(DECODINGS["greedy"], alignments=True), model[0])
    cfg = dataclasses.replace(cfg, data=DataConfig(**files, transforms=(TAGS,), bucket_lengths=(16,)))
    text, target = "b c a b", "T U V"
    ids = tokenizers.source.special.wrap_side(tokenizers.source.encode(f"<hq>{text}"))
    engine = Engine(cfg, *model, tokenizers, max_rows=1)
    engine.submit(Request(tuple(ids), cfg.decode, text=text))
    events = [event for _ in range(99) if not engine.idle for event in engine.step()]
    written = [i for event in events for i in event.ids]

    def word_weights(tokens):
        rows = {"source": ids, "target_in": [BOS, *tokens]}
        actual = watch(*model, {key: np.array([row]) for key, row in rows.items()})
        single = jax.tree.map(lambda x: np.asarray(x)[0], actual)
        shown = without_padding(single, Seq2Seq, {key: len(row) for key, row in rows.items()})
        return shown, shown.weights["cross"][..., 1:5]

    _, weights = word_weights(written[:-1])
    places = [t for t, i in enumerate(written) if TARGET.decode([i], unknown="<unk>")]
    best = weights[-1].mean(axis=0).argmax(axis=-1)
    assert events[-1].alignment == tuple(sorted((int(best[t]), word) for word, t in enumerate(places)))
    watched, weights = word_weights(TARGET.encode(target))
    references = [read_links("0-0 3-1 1-2")]
    rates = head_error_rates(tokenizers, [(text, target)], [watched], references, cfg.data.transforms)
    for (layer, head, query), rate in rates.items():
        own = weights[layer].mean(axis=0) if head is None else weights[layer, head]
        best = own[query == "reads" :][:3].argmax(axis=-1)
        assert rate == pytest.approx(error_rate([[(int(place), word) for word, place in enumerate(best)]], references))


def test_the_choice_is_recorded_and_does_not_replace_a_setting(model, tmp_path):
    cfg = config(DecodeConfig(), model[0])
    assert run_folder.with_chosen_head(tmp_path, cfg) is cfg
    path = run_folder.write_chosen_head(tmp_path, AlignmentHead(0, None, "reads"), {"error_rate": 0.25})
    assert json.loads(path.read_text()) == {"layer": 0, "head": None, "query": "reads", "error_rate": 0.25}
    assert run_folder.with_chosen_head(tmp_path, cfg).decode.aligning == (0, None, "reads")
    set_by_config = config(DecodeConfig(alignment_head=3), model[0])
    assert run_folder.with_chosen_head(tmp_path, set_by_config) is set_by_config


def test_a_head_that_the_model_lacks_is_refused(model):
    with pytest.raises(UserError, match="decode.alignment_head=4: must be less than the model's number of heads, 4"):
        config(DecodeConfig(alignment_head=4), model[0])
    cfg = config(DecodeConfig(alignments=True), model[0])
    cfg = dataclasses.replace(cfg, decode=dataclasses.replace(cfg.decode, alignment_layer=1))
    object.__setattr__(cfg.decode, "alignment_layer", 2)
    with pytest.raises(UserError, match="decode.alignment_layer=2: must be less than the model's number of layers, 2"):
        Translator(cfg, model[0], TOKENIZERS)(model[1], ["a"])


@pytest.mark.parametrize(
    "users", [{"alignments": True}, {"unknown": "copy"}, {"markup": "align"}, {"casing": "titles"}]
)
def test_a_head_that_nothing_reads_is_refused(users):
    assert DecodeConfig().changed({"alignment_head": 1, **users}).aligning == (None, 1, "predicts")
    assert DecodeConfig(**users).changed({"alignment_layer": 1}).aligning == (1, None, "predicts")
    assert DecodeConfig().changed({"alignment_query": "predicts"}) == DecodeConfig()
    with pytest.raises(UserError, match="--alignment-layer has no effect without --alignments, or unknown, markup or"):
        DecodeConfig().changed({"alignment_layer": 0}, lambda name: f"--{name.replace('_', '-')}")
