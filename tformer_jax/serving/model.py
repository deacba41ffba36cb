"""The model that a server serves, and what it computes for one request besides generation."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.config import Config, DecodeConfig, kinds
from tformer_jax.data.characters import is_blank
from tformer_jax.data.chat.messages import Chat
from tformer_jax.data.languages import english_name
from tformer_jax.data.markup import take_out
from tformer_jax.data.placeholders import mask
from tformer_jax.data.tokenizers import Tokenizer, Tokenizers
from tformer_jax.data.tokenizers.chats import encode_prompt
from tformer_jax.data.tokenizers.language_tags import languages_of
from tformer_jax.inference.embeddings import Embedder, embed_rows
from tformer_jax.inference.encoding import NO_START, no_tokens, start_of_text, too_long, wrap_prompt
from tformer_jax.inference.forced import first_tokens
from tformer_jax.inference.languages import Languages, TagIds
from tformer_jax.inference.risk import Utility
from tformer_jax.inference.scores import Row, Scored, score_rows
from tformer_jax.inference.text import classify_rows
from tformer_jax.models.ensemble import first_member
from tformer_jax.models.family import Family
from tformer_jax.serving.errors import RequestError

Text = str | tuple[int, ...]
"""A text, or its token ids."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that a server serves, with its settings."""

    name: str
    family: str
    decode: DecodeConfig
    tokenizers: Tokenizers
    max_length: int
    """Maximum number of tokens that the model reads."""
    prefix_lm: bool
    """Whether all tokens of a prompt attend to each other."""
    score: Callable[[Sequence[Row], int], list[Scored]]
    """Scores rows, with the given number of most probable tokens at each position."""
    embed: Callable[[Sequence[Sequence[int]]], list[np.ndarray]]
    """Computes the embeddings of rows of token ids, float32 [D]."""
    classify: Callable[[Sequence[Sequence[int]]], list[np.ndarray]]
    """Computes the probabilities of all labels of rows of token ids, float32 [classes]."""
    embedded_length: int | None = None
    """Maximum number of tokens of a text to embed; None: `max_length`."""
    prompt: str = ""
    """Text that is put before each text to embed."""
    labels: tuple[str, ...] = ()
    """Class names of a classifier; empty: its head is not trained."""
    start: tuple[int, ...] = ()
    """What an empty prompt is read as (`start_of_text`); (): it is an error."""
    utility: Utility = Utility()  # noqa: RUF009
    """Ranks the outputs of minimum Bayes risk decoding."""
    languages: Languages | None = None
    """The languages of a translator."""
    attention: Callable[[Any, str], str] | str = ""
    """Renders the page of the attention of a source (or its `Request`) or prompt, and its output; a string: why there
    is none."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the web page says about the run, ready for JSON."""

    @classmethod
    def build(
        cls,
        cfg: Config,
        model: nn.Module,
        params: Any,
        tokenizers: Tokenizers,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        **options: Any,
    ) -> "ServedModel":
        """Serves a trained model; `options` are `labels`, `attention` and `about`.

        Of an ensemble, the first member embeds texts.

        Args:
            pooling, normalize: how embeddings are computed; see `Embedder`.
        """
        shown = first_member(model, params)
        embedder = Embedder(cfg, shown[0], tokenizers, pooling=pooling, normalize=normalize)
        embed = functools.partial(embed_rows, *shown, pooling=embedder.pooling, normalize=embedder.normalize)
        batch_size = cfg.eval.batch_size
        return cls(
            cfg.name,
            cfg.model.family,
            cfg.decode,
            tokenizers,
            cfg.model.max_length,
            cfg.model.prefix_lm,
            embedded_length=cfg.embed.max_length,
            prompt=cfg.embed.prompt_text(cfg.embed.prompt),
            utility=Utility.of_run(cfg, tokenizers),
            start=start_of_text(cfg, tokenizers.target) if cfg.model.model_class.continues else (),
            languages=Languages(cfg.data, tokenizers) if cfg.model.model_class.reads_source else None,
            score=lambda rows, top: list(score_rows(model, params, rows, batch_size, top)),
            embed=lambda rows: list(embed(rows, batch_size)),
            classify=lambda rows: list(classify_rows(model, params, rows, batch_size)),
            **options,
        )

    @property
    def model_class(self) -> type[Family]:
        """The class of the model."""
        return kinds.load(kinds.FAMILIES, self.family)

    @property
    def translates(self) -> bool:
        """Whether the model translates its inputs, instead of continuing them."""
        return self.model_class.reads_source

    @property
    def answers(self) -> bool:
        """Whether the model answers conversations, by a chat template."""
        return self.model_class.continues and self.tokenizers.target.chat is not None

    @property
    def gives_logprobs(self) -> bool:
        """Whether the tokens of outputs have log-probabilities that one pass over the output computes."""
        return self.translates or (self.model_class.continues and not self.prefix_lm)

    @functools.cached_property
    def prefix_tokens(self) -> int:
        """Number of tokens of the prefix of every output; 0 without one."""
        if not self.decode.prefix:
            return 0
        return len(first_tokens(self.decode, self.tokenizers.target, continues=self.model_class.continues).ids)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of inputs."""
        return self.tokenizers.source if self.translates else self.tokenizers.target

    @property
    def longest_prompt(self) -> int:
        """Maximum number of tokens of a text from which an output is generated, with its special tokens."""
        return self.max_length if self.translates else self.max_length - 1

    def add_special_tokens(self, ids: Sequence[int], tags: Sequence[int] = ()) -> list[int]:
        """Returns the token ids of a text with the special tokens around it, and the language tags of a source."""
        special = self.tokenizer.special
        return special.wrap_side(ids, tags) if self.translates else special.wrap_text(ids)

    @property
    def language_names(self) -> dict[str, dict[str, str]]:
        """English names by code of the languages that a request names, by its field; {}: it names none."""
        choices = self.languages.choices if self.languages else {}
        return {field: {code: english_name(code) for code in codes} for field, codes in choices.items()}

    def tags(self, targets: Sequence[str | None], sources: Sequence[str | None]) -> list[TagIds]:
        """Returns the language tags of each text, and of its output.

        Raises:
            RequestError: the model does not know a language, or needs one that is not given.
        """
        if self.languages is None:
            if any(targets) or any(sources):
                raise RequestError("the model has no languages: leave target_language and source_language out")
            return [((), ())] * len(targets)
        rows = []
        for number, pair in enumerate(zip(targets, sources, strict=True), start=1):
            try:
                rows.append(self.languages.tags(*pair))
            except UserError as error:
                which = f"text {number}: " if len(targets) > 1 else ""
                raise RequestError(f"{which}{error}") from None
        return rows

    def encode(
        self, field: str, texts: Sequence[Text], limit: int, tags: Iterable[tuple[int, ...]] | None = None
    ) -> list[tuple[int, ...]]:
        """Returns the token ids of the texts in a field of a request, as the model reads them.

        Given token ids are read as they are, except that a source always ends as sources do; a blank source has none.

        Args:
            limit: maximum number of tokens of a text, with its special tokens.
            tags: language tags of each text; None: there are none.

        Raises:
            RequestError: a text is empty or too long, or a token id is unknown.
        """
        name = self.model_class.input_name
        rows = []
        for number, (text, before) in enumerate(zip(texts, tags or itertools.repeat(()), strict=False), start=1):
            ids = self._ids(field, text, before)
            which = f"text {number}: " if len(texts) > 1 else ""
            if len(ids) > limit:
                raise RequestError(f"{which}{too_long(f'the {name}', len(ids), limit)}", param=field)
            if not ids and not self.translates:
                why = NO_START if self.model_class.continues else ""
                raise RequestError(which + no_tokens(f"the {name}", text, why), param=field)
            rows.append(ids)
        return rows

    def encode_chat(self, chat: Chat) -> tuple[int, ...]:
        """Returns the token ids of a conversation up to the beginning of its next answer.

        Raises:
            RequestError: the template refuses it, or it is too long.
        """
        try:
            ids = encode_prompt(self.tokenizers.target, chat)
        except UserError as error:
            raise RequestError(f"messages: {error}", param="messages") from None
        if len(ids) > self.longest_prompt:
            raise RequestError(too_long("the conversation", len(ids), self.longest_prompt), param="messages")
        return tuple(ids)

    def encode_to_embed(self, field: str, texts: Sequence[Text]) -> list[tuple[int, ...]]:
        """Returns the token ids of texts to embed, with the prompt of the run before texts; see `encode`."""
        prompted = [self.prompt + text if isinstance(text, str) else text for text in texts]
        return self.encode(field, prompted, self.embedded_length or self.max_length)

    def _ids(self, field: str, text: Text, tags: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(text, str) and not self.translates:
            return tuple(wrap_prompt(self.tokenizer, text, self.tokenizer.encode(text), self.start))
        if isinstance(text, str):
            text = take_out(text, self.tokenizers.placeholders).plain if self.decode.markup == "align" else text
            formatted = text if self.languages is None else self.languages.format_source(text)
            read = mask(self.tokenizers.placeholders, formatted).text
            ids = [] if is_blank(text) else self.tokenizer.encode(read)
            return tuple(self.add_special_tokens(ids, tags) if ids else ())
        self.check_ids(field, text)
        return self._closed(text) if self.translates else text

    def _closed(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the given token ids of a source with its end, before tags that follow it."""
        special, size = self.tokenizer.special, len(ids)
        tags = languages_of(self.tokenizer).values() if special.tags_last else ()
        while size and ids[size - 1] in tags:
            size -= 1
        closing = special.after_source
        return ids if ids[:size][size - len(closing) :] == closing else (*ids[:size], *closing, *ids[size:])

    def decode_all(self, ids: Sequence[int], *, named: bool = False) -> str:
        """Returns the text of all ids, also of ids after an EOS token, with the names of unknown tokens.

        Args:
            named: with the names of all special tokens.
        """
        special = self.tokenizer.special
        decode = functools.partial(self.tokenizer.decode, unknown=special.unknown_name)
        if not named:
            shown = (i for i in ids if special.name(i) is None or i == special.shown_unknown)
            return decode([i for i in shown if i not in special.eos])
        runs = ((name, list(run)) for name, run in itertools.groupby(ids, special.name))
        return "".join(decode(run) if name is None else name * len(run) for name, run in runs)

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raises `RequestError` if ids are not in the vocabulary."""
        vocab_size = self.tokenizer.vocab_size
        if unknown := [i for i in ids if not 0 <= i < vocab_size]:
            raise RequestError(f"{field}: token id {unknown[0]} is not in 0, ..., {vocab_size - 1}", param=field)
