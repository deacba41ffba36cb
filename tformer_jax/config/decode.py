"""Settings of how outputs are computed: decoding, and the embeddings of texts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tformer_jax.config import kinds
from tformer_jax.config.fields import INT32_MAX, OTHER_TRAINING, SAME_TRAINING, ConfigError, Section, nearest, setting
from tformer_jax.config.layers import DTYPES

SAMPLING = {"strategy": ("sample",)}
BEAM_SEARCH = {"strategy": ("beam",)}


class AlignmentHead(NamedTuple):
    """The cross-attention that aligns words: the settings `alignment_...`."""

    layer: int | None
    head: int | None
    query: str


@dataclasses.dataclass(frozen=True)
class DecodeConfig(Section):
    """Settings of text generation."""

    path: ClassVar[str] = "decode"
    resumable: ClassVar[str | None] = SAME_TRAINING
    selectable: ClassVar[tuple[str, ...]] = ("strategy",)

    strategy: str = setting("greedy", "how tokens are chosen", choices=("greedy", "sample", "beam"))
    beams: int = setting(4, "beam width", low=1, high=256, used_by=BEAM_SEARCH)
    length_penalty: str = setting(
        "average",
        "divide the log-probability by length^alpha (average) or ((5 + length) / 6)^alpha (gnmt)",
        choices=("average", "gnmt"),
        used_by=BEAM_SEARCH,
    )
    length_alpha: float = setting(
        1.0, "alpha of the length penalty; 0 disables it", low=0.0, high=5.0, used_by=BEAM_SEARCH
    )
    early_stopping: str = setting(
        "heuristic",
        "end when the number of finished outputs equals the beam width (first), when a better output is unlikely "
        "(heuristic), or when it is impossible (never)",
        choices=("first", "heuristic", "never"),
        used_by=BEAM_SEARCH,
    )
    renormalize: bool = setting(
        False, "divide the probabilities of the tokens that the constraints allow by their sum", used_by=BEAM_SEARCH
    )
    temperature: float = setting(
        1.0,
        "divisor of the logits; 0 in a flag or a request selects greedy decoding",
        low=1e-4,
        high=100.0,
        used_by=SAMPLING,
    )
    top_k: int | None = setting(None, "keep the k most probable tokens", low=1, high=INT32_MAX, used_by=SAMPLING)
    top_p: float | None = setting(
        None, "keep the most probable tokens up to this total probability", low=0.0, high=1.0, used_by=SAMPLING
    )
    min_p: float = setting(
        0.0, "keep tokens with at least this fraction of the highest probability", low=0.0, high=1.0, used_by=SAMPLING
    )
    candidates: int = setting(
        1,
        "number of samples or beam search outputs for minimum Bayes risk decoding, which returns the one that is most "
        "similar to all of them, by decode.utility; 1 disables it",
        low=1,
        high=1024,
    )
    utility: str = setting("chrf", "similarity of candidates: chrf, which is fast, or another metric of translations")
    max_new_tokens: int | None = setting(
        None,
        "maximum length of an output, in tokens; model.max_length limits it too; None: only model.max_length does",
        low=1,
        high=INT32_MAX,
    )
    cache_dtype: str | None = setting(
        None, "dtype of cached keys and values; None: model.dtype", choices=(*DTYPES, "int8")
    )
    lookup_tokens: int = setting(
        0,
        "language models: maximum number of tokens that a step tries besides the next, looked up where the prompt or "
        "the output has its newest tokens; outputs stay the same, and repeated texts are written faster",
        low=0,
        high=64,
        used_by={"strategy": ("greedy", "sample")},
    )
    min_new_tokens: int = setting(
        0, "minimum length of an output, in tokens; a stop sequence may end it earlier", low=0, high=INT32_MAX
    )
    repetition_penalty: float = setting(
        1.0,
        "divide the logits of tokens that occurred by this (multiply negative ones); 1 disables it",
        low=0.01,
        high=100.0,
    )
    no_repeat_ngram: int = setting(
        0, "forbid repeated n-grams of this many tokens; 0 disables it", low=0, high=INT32_MAX
    )
    forbidden: tuple[str, ...] = setting((), "texts that outputs must not contain, as tokenized alone or after a space")
    prefix: str = setting("", "text that every output starts with; scores and their lengths do not count its tokens")
    glossary: str = setting(
        "",
        "file with a term, a tab and its translations on each line: the output for a text with a term must have one of "
        "its translations",
        used_by=BEAM_SEARCH,
    )
    split_sentences: bool = setting(
        False,
        "translation: translate each sentence of a text separately, and keep the spaces and blank lines between them",
    )
    context: int = setting(
        0,
        "number of sentences of a text that the model reads before each, with decode.split_sentences; its output "
        "starts with their translations, which are left out. For models trained with the transform concatenation and a "
        "separator",
        low=0,
        high=1000,
    )
    unknown: str = setting(
        "show",
        "unknown tokens in outputs: show their name, such as <unk>; copy the word of the source that each attends to "
        "most (translation); or omit them. Outputs with copied words appear only when they are complete",
        choices=("show", "copy", "omit"),
    )
    detokenize: bool = setting(
        False, "translation: undo the step moses of data.normalize in outputs, which appear only when they are complete"
    )
    markup: str = setting(
        "keep",
        "translation: tags (<b>) and placeholders ({0}, %s) that data.placeholders does not name: keep them in texts "
        "that the model reads, or align: take them out, and put them into outputs by the alignment of words; outputs "
        "then appear only when they are complete",
        choices=("keep", "align"),
    )
    casing: str = setting(
        "keep",
        "translation: keep the case of output words, or copy the case of aligned source words: all-capitals words only "
        "(capitals), or also initial capitals (titles); outputs with copied case appear only when they are complete",
        choices=("keep", "capitals", "titles"),
    )
    alignments: bool = setting(False, "translation: align the words of each output with the words of its source")
    alignment_layer: int | None = setting(
        None,
        "decoder layer, from 0, whose cross-attention aligns words; None: the last, or chosen by attention.py --links",
        low=0,
        resumable=OTHER_TRAINING,
    )
    alignment_head: int | None = setting(
        None,
        "head of that layer, from 0; None: the mean of all, or the choice of attention.py --links",
        low=0,
        resumable=OTHER_TRAINING,
    )
    alignment_query: str = setting(
        "predicts",
        "where the cross-attention of a token is read: at the step that predicts it, or at the next, which reads it "
        '("Accurate Word Alignment Induction from Neural Machine Translation", 2020)',
        choices=("predicts", "reads"),
        resumable=OTHER_TRAINING,
    )
    stop: tuple[str, ...] = setting(
        (),
        "end an output before the first of these texts; beam search ranks and scores the whole outputs, then cuts them",
    )

    def check(self) -> None:
        if self.candidates > 1 and self.strategy == "greedy":
            raise self.error("candidates", "needs decode.strategy='sample' or 'beam': greedy decoding has one output")
        if self.strategy == "beam" and self.candidates > self.beams:
            raise self.error("candidates", f"must not exceed decode.beams={self.beams}")
        if self.utility not in kinds.METRICS:
            raise self.error("utility", f"must be one of {', '.join(kinds.METRICS)}")
        if self.glossary and self.strategy != "beam":
            raise self.error("glossary", "needs decode.strategy='beam': write '', or choose a number of beams")
        if self.candidates == 1 and self.utility != "chrf":
            raise self.error("utility", "compares candidates: write decode.candidates above 1")
        if self.alignments and self.markup == "align":
            raise self.error("alignments", "numbers words of texts without markup: write decode.markup='keep'")
        if self.alignments and self.split_sentences:
            raise self.error("alignments", "numbers words of whole texts: write decode.split_sentences=False")
        if self.context:
            self._check_context()
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise self.error("min_new_tokens", f"must not exceed decode.max_new_tokens={self.max_new_tokens}")
        for name, texts in (("forbidden", self.forbidden), ("stop", self.stop)):
            if "" in texts:
                raise self.error(name, "must not contain an empty text; write () for none")
            for text in texts:
                if text in self.prefix:
                    raise self.error(
                        name, f"{text!r} occurs in decode.prefix={self.prefix!r}; remove it from one of them"
                    )

    def _check_context(self) -> None:
        if not self.split_sentences:
            raise self.error("context", "is in sentences: write decode.split_sentences=True")
        if self.glossary:
            raise self.error("context", "cannot be combined with decode.glossary: leave one of them out")
        for name, neutral in (("detokenize", False), ("markup", "keep"), ("casing", "keep")):  # change the text
            if (value := getattr(self, name)) != neutral:
                raise self.error("context", f"cannot be combined with decode.{name}={value!r}: leave one of them out")

    def check_documents(self, trained: tuple[int, str] | None) -> None:
        """Raises `ConfigError` if a model does not read so many sentences at once.

        Args:
            trained: the most sentences in one of its training examples, and the separator between them; None: one.
        """
        if self.context and (trained is None or not trained[1].strip()):
            problem = "needs a model trained with concatenation in data.transforms, of the next examples and with a "
            raise self.error("context", f"{problem}separator of data.symbols; write 0")
        if self.context and trained and self.context >= trained[0]:
            problem = f"the model was trained on at most {trained[0]} sentences at once: write at most {trained[0] - 1}"
            raise self.error("context", problem)
        for name in ("stop", "forbidden"):
            if self.context and trained and (taken := [text for text in getattr(self, name) if text in trained[1]]):
                problem = f"{taken[0]!r} is in the separator {trained[1]!r} of decode.context: leave one of them out"
                raise self.error(name, problem)

    def check_alignment(self, layers: int, heads: int) -> None:
        """Raises `ConfigError` if a decoder of `layers` layers has no such layer, or no such head."""
        for name, count in (("alignment_layer", layers), ("alignment_head", heads)):
            if (getattr(self, name) or 0) >= count:
                raise self.error(name, f"must be less than the model's number of {name.split('_')[1]}s, {count}")

    def check_lookup(self, attentions: Sequence[str], *, continues: bool) -> None:
        """Raises `ConfigError` if a model does not continue texts, or cannot take back tokens that it has read."""
        recurrent = [name for name in attentions if kinds.is_recurrent(name)]
        if self.lookup_tokens and (recurrent or not continues):
            needed = f"attention without a state, not {recurrent[0]}" if continues else "a language model"
            raise self.error("lookup_tokens", f"needs {needed}; write 0")

    @property
    def aligns(self) -> bool:
        """Whether the words of each output are aligned with the words of its source."""
        return self.alignments or self.markup == "align" or self.unknown == "copy" or self.casing != "keep"

    @property
    def aligning(self) -> AlignmentHead:
        """The cross-attention that aligns words."""
        return AlignmentHead(self.alignment_layer, self.alignment_head, self.alignment_query)

    @property
    def width(self) -> int:
        """Number of tokens of one row that are decoded in parallel: the beam width, or 1."""
        return self.beams if self.strategy == "beam" else 1

    @property
    def tokens_per_step(self) -> int:
        """Maximum number of tokens of one row that a step reads."""
        return self.beams if self.strategy == "beam" else 1 + self.lookup_tokens

    def changed(self, changes: Mapping[str, Any], name: Callable[[str], str] = str) -> "DecodeConfig":
        """Returns a copy with changes; settings of sampling or beam search select that strategy, unless it is given.

        Args:
            changes: new values by name; temperature 0 selects greedy decoding.
            name: formats a setting for error messages, for example as a flag.

        Raises:
            ConfigError: a setting is unknown or out of range, or belongs to another strategy than the one given.
        """
        if changes.get("temperature") == 0 and changes.get("strategy") != "beam":
            changes = {key: value for key, value in changes.items() if self.used_by(key) != SAMPLING}
            changes["strategy"] = "greedy"
        for changed in changes:
            self.check_name(changed)
        sampling, search = ([key for key in changes if self.used_by(key) == users] for users in (SAMPLING, BEAM_SEARCH))
        if sampling and search:
            raise ConfigError(
                f"{name(sampling[0])} is for sampling and {name(search[0])} for beam search: write one of them"
            )
        strategy = changes.get("strategy") or ("sample" if sampling else "beam" if search else self.strategy)
        for other, names in (("sample", sampling), ("beam", search)):
            if names and strategy != other:
                raise ConfigError(f"{name(names[0])} needs {name('strategy')} {other}, but it is {strategy}")
        if strategy == "beam" and changes.get("lookup_tokens"):
            raise ConfigError(f"{name('lookup_tokens')} has no effect on beam search: leave it out")
        result = dataclasses.replace(self, **{**changes, "strategy": strategy})
        unread = [key for key in changes if key.startswith("alignment_") and changes[key] != getattr(self, key)]
        if unread and not result.aligns:
            users = f"{name('alignments')}, or unknown, markup or casing that use them"
            raise ConfigError(f"{name(unread[0])} has no effect without {users}: leave it out")
        return result


@dataclasses.dataclass(frozen=True)
class EmbedConfig(Section):
    """How a text becomes a vector, as `embed.py`, `serve.py` and `Run.embed` compute it unless told otherwise."""

    path: ClassVar[str] = "embed"

    pooling: str = setting(
        "mean", "pooling of the last hidden states over the tokens of a text", choices=kinds.EMBEDDING_POOLINGS
    )
    normalize: bool = setting(False, "scale embeddings to length 1")
    max_length: int | None = setting(
        None, "maximum length of a text, in tokens, special tokens included; None: model.max_length", low=1
    )
    prompts: tuple[str, ...] = setting((), "texts that can be put before a text, each as NAME=TEXT")
    prompt: str = setting("", "name of the prompt of texts for which none is given; '': none")

    only: bool = setting(False, "the output head is not trained: the run only embeds texts")

    def check(self) -> None:
        for prompt in self.prompts:
            if "=" not in prompt:
                raise self.error("prompts", f"must hold NAME=TEXT, not {prompt!r}")
        if self.prompt:
            self.prompt_text(self.prompt)

    def prompt_text(self, name: str) -> str:
        """Returns the text of a prompt; "" has none.

        Raises:
            ConfigError: there is no prompt of this name.
        """
        texts = dict(prompt.split("=", maxsplit=1) for prompt in self.prompts)
        if name and name not in texts:
            hint = nearest(name, texts) if texts else "; embed.prompts has none"
            raise ConfigError(f"there is no prompt {name!r} for embeddings{hint}")
        return texts.get(name, "")
