"""Strings in, strings out, with a draft: in the place of `text.Translator` and `text.TextGenerator`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from flax import linen as nn

from tformer_jax.config import Config
from tformer_jax.data.tokenizers import Tokenizers
from tformer_jax.inference import speculative
from tformer_jax.inference.batching import in_batches, in_chunks
from tformer_jax.inference.constraints import Rules
from tformer_jax.inference.encoding import prompt_reader, source_reader
from tformer_jax.inference.outputs import Output
from tformer_jax.inference.sampling import row_keys
from tformer_jax.inference.stopping import TextStream
from tformer_jax.special_tokens import PAD


class SpeculativeDecoder:
    """Translates texts with a `Seq2Seq` model, or continues prompts with a `DecoderLM`; a draft proposes tokens.

    Raises:
        ConfigError: the vocabulary cannot write what `cfg.decode` forces or forbids.
    """

    def __init__(self, cfg: Config, model: nn.Module, tokenizers: Tokenizers, draft: nn.Module, draft_params: Any):
        self.cfg, self.model, self.tokenizers = cfg, model, tokenizers
        self.draft, self.draft_params = draft, draft_params
        self.proposed = self.accepted = 0
        """Tokens so far that the draft proposed, and those of them that were kept."""
        self._rules = Rules.of(cfg.decode, tokenizers.target)
        self._translates = cfg.model.family == "seq2seq"

    def stream(
        self, params: Any, texts: Iterable[str], *, seed: int = 0, outputs: int = 1, skip: int = 0
    ) -> Iterator[list[Output]]:
        """So many outputs of each text, in order; arguments as of `Translator.stream`.

        Raises:
            ConfigError: a text does not fit the model, after the outputs of all before it; or the draft does not fit
                the model.
        """
        texts = iter(texts)
        max_length = self.cfg.model.max_length
        if self._translates:
            read = source_reader(self.tokenizers.source, texts, max_length)
        else:
            read = prompt_reader(self.tokenizers.target, texts, max_length)

        def run(rows: list[list[int]], place: int) -> list[list[Output]]:
            return self._decode(params, rows, place, seed, outputs)

        return in_chunks(texts, read, run, skip=skip)

    def stream_pieces(self, params: Any, text: str, *, seed: int = 0) -> Iterator[str]:
        """The output of one text, piece by piece."""
        for outputs in self.stream(params, [text], seed=seed):
            yield outputs[0].text

    def acceptance(self) -> str:
        """How the draft did, in words."""
        percent = f" ({100 * self.accepted / self.proposed:.1f} %)" if self.proposed else ""
        return f"draft: {self.accepted:,} of {self.proposed:,} proposed tokens kept{percent}"

    def _decode(
        self, params: Any, rows: Sequence[list[int]], place: int, seed: int, outputs: int
    ) -> list[list[Output]]:
        decode = speculative.translate if self._translates else speculative.continue_text
        cfg = self.cfg
        length = min(cfg.decode.max_new_tokens, cfg.model.max_length)

        def run(tokens: np.ndarray, places: np.ndarray) -> list[Output]:
            keys = row_keys(seed, place * outputs + places)
            options: Any = {"length": length, "cfg": cfg.decode, "rules": self._rules}
            found = decode(self.model, params, self.draft, self.draft_params, tokens, keys, **options)
            self.proposed += int(found.proposed.sum())
            self.accepted += int(found.accepted.sum())
            pairs = zip(np.asarray(found.tokens).tolist(), np.asarray(found.log_probs).tolist(), strict=True)
            return [self._output(ids, log_probs) for ids, log_probs in pairs]

        repeated = [row for row in rows for _ in range(outputs)]
        size, max_length = cfg.eval.batch_size, cfg.model.max_length
        found = in_batches(repeated, run, size=size, max_length=max_length, pad_left=not self._translates)
        found = [output if row else Output("", None) for row, output in zip(repeated, found, strict=True)]
        return [found[start : start + outputs] for start in range(0, len(found), outputs)]

    def _output(self, ids: Sequence[int], log_probs: Sequence[float]) -> Output:
        """What stands before EOS or a text that stops; the score counts what it took to get there."""
        stream, text, score = TextStream(self.tokenizers.target, self.cfg.decode.stop), "", 0.0
        for token, log_prob in zip(ids, log_probs, strict=True):
            if stream.done or token == PAD:
                break
            text += stream.feed(token)
            score += log_prob
        return Output(text + stream.close(), score)
