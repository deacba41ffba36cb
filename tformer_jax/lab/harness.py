"""A run as a model of lm-evaluation-harness, without a server: `lm_eval.simple_evaluate(model=HarnessModel(run), ...)`.

Requires `pip install "lm-eval>=0.4.10"`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tformer_jax.api import Run
from tformer_jax.base.errors import UserError
from tformer_jax.inference.encoding import NO_START, start_of_text
from tformer_jax.inference.scores import Row, make_text_row, score_rows

MAX_NEW_TOKENS = 256
"""Maximum length of outputs of tasks that do not name one; the harness's default for its own models."""
TokenRequest = tuple[Any, list[int], list[int]]
"""A request, and the token ids of its context and of the continuation to score."""


class HarnessModel(TemplateLM):
    """Scores and continues texts with a language model.

    Contexts that are too long lose their beginning, as in the harness's own models; a warning says how many.
    """

    def __init__(self, run: Run):
        """Raises `UserError` for a run that does not continue texts."""
        super().__init__()
        run.require("generate")
        self._run, self._tokenizer = run, run.tokenizers.target

    @property
    def eot_token_id(self) -> int:
        """The token after which a text without a context is scored."""
        start = start_of_text(self._run.config, self._tokenizer)
        if not start:
            raise UserError(f"texts without a context cannot be scored: {NO_START}")
        return start[-1]

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads."""
        return self._run.config.model.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the token ids of a text, after the special tokens that begin texts unless told otherwise."""
        before = () if add_special_tokens is False else self._tokenizer.special.before
        return [*before, *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **_: Any) -> list[tuple[float, bool]]:
        _warn_of_cuts(sum(len(context) + len(rest) > self.max_length + 1 for _, context, rest in requests))
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        run = self._run
        return [
            (scored.total, all(token in top for token, top in zip(scored.tokens, scored.top, strict=True)))
            for scored in score_rows(run.model, run.params, rows, run.config.eval.batch_size, top=1)
        ]

    def _row(self, context: list[int], continuation: list[int]) -> Row:
        """Returns the row that scores a continuation.

        Raises:
            UserError: the model cannot read all of the continuation.
        """
        ids = (context + continuation)[-(self.max_length + 1) :]
        given = len(ids) - len(continuation)
        if given < 1:
            problem = f"has {len(continuation):,} tokens, but model.max_length is {self.max_length:,}"
            raise UserError(f"a continuation {problem}: leave out the task")
        row = make_text_row(ids, given)
        prefix_lm = self._run.config.model.prefix_lm
        return row._replace(inputs=row.inputs | {"prefix": [given]}) if prefix_lm else row

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text; each of its tokens is predicted once."""
        totals = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns a continuation of each context, with the settings of its task.

        Raises:
            UserError: a setting is not one of `decode`, or leaves no room for a context.
        """
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(place)
        outputs = [""] * len(requests)
        for places in groups.values():
            settings = _decoding_settings(requests[places[0]].args[1])
            contexts = self._fit_contexts([requests[place].args[0] for place in places], settings["max_new_tokens"])
            for place, output in zip(places, self._run.generate(contexts, **settings), strict=True):
                outputs[place] = output
        return outputs

    def _fit_contexts(self, contexts: Sequence[str], new_tokens: int) -> list[str]:
        """Returns the ends of contexts that leave room for a number of new tokens."""
        room = self.max_length - new_tokens - len(self._tokenizer.special.before)
        if room < 1:
            problem = f"max_gen_toks={new_tokens} leaves no room for a context in model.max_length={self.max_length}"
            raise UserError(f"{problem}: set fewer by gen_kwargs")
        encoded = [self._tokenizer.encode(text) for text in contexts]
        _warn_of_cuts(sum(len(ids) > room for ids in encoded))
        pairs = zip(contexts, encoded, strict=True)
        return [text if len(ids) <= room else self._tokenizer.decode(ids[-room:]) for text, ids in pairs]


def _decoding_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of `decode` for the `gen_kwargs` of a task."""
    rest = dict(given)
    stop, new_tokens = rest.pop("until", ()), rest.pop("max_gen_toks", MAX_NEW_TOKENS)
    sampled = rest.pop("do_sample", "temperature" in rest)
    temperature = rest.pop("temperature", 1.0)
    how = {"strategy": "sample", "temperature": temperature} if sampled and temperature else {"temperature": 0}
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    return {"stop": tuple(filter(None, stops)), "max_new_tokens": new_tokens, **how, **rest}


def _warn_of_cuts(count: int) -> None:
    if count:
        logging.getLogger(__name__).warning("%d contexts are too long for the model and lost their beginning", count)
