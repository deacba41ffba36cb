"""A trained run as a Python object, for notebooks and programs.

import tformer_jax as tj

run = tj.load("runs/translate_cldr_en_de")
run.translate(["in 3 weeks", "3:33 PM"], beams=4)
"""

import dataclasses
import functools
import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import linen as nn

from tformer_jax.base.errors import UserError
from tformer_jax.base.paths import as_path, resolved
from tformer_jax.config import Config, DecodeConfig, read_mesh
from tformer_jax.config.layers import MEANS
from tformer_jax.config.task import task_of
from tformer_jax.data.chat.messages import Chat, Message
from tformer_jax.data.tokenizers import Tokenizers, same_tokens
from tformer_jax.inference.arguments import (
    LanguageNames,
    chat_requests,
    check_examples,
    check_loaded,
    check_texts,
    example_parts,
    make_requests,
    several_texts,
    with_languages,
)
from tformer_jax.inference.batching import WINDOW, compute_rows, run_in_chunks
from tformer_jax.inference.embeddings import Embedder
from tformer_jax.inference.encoding import LongTexts, check_example, text_inputs
from tformer_jax.inference.fill_mask import Fill, MaskFiller
from tformer_jax.inference.languages import Languages
from tformer_jax.inference.layout import quantized_layout
from tformer_jax.inference.outputs import Output
from tformer_jax.inference.requests import Request
from tformer_jax.inference.scores import Scored, Scorer
from tformer_jax.inference.text import LabelClassifier, TextGenerator, Translator
from tformer_jax.inference.watch import Watched, watch, weight_shapes, without_padding
from tformer_jax.models import cost, registry
from tformer_jax.models.ensemble import Ensemble, check_member
from tformer_jax.parallel import rules
from tformer_jax.parallel.mesh import make_mesh
from tformer_jax.runs import run_folder
from tformer_jax.runs.trained import load_trained
from tformer_jax.tasks.task import Task

if TYPE_CHECKING:
    from tformer_jax.report.history_plot import Plot


def load(
    path: str | Path,
    *,
    mesh: str | None = None,
    step: int | None = None,
    quantization: str | None = None,
    ensemble: Sequence[str | Path] = (),
    mean: str | None = None,
) -> "Run":
    """Loads a run folder of `scripts/train.py`: its final weights, or the newest checkpoint of an unfinished run.

    Args:
        path: the run folder.
        mesh: devices to shard the model over, such as "data=2,tensor=4" or "fsdp"; None: the first device.
        step: load the checkpoint of this step instead: its parameters, or their EMA if `train.weights="ema"`.
        quantization: "int8_weights" or "int8", to store kernels as int8 (`model.quantization`).
        ensemble: further runs with the same tokens, which decode, score and are evaluated together with this run;
            with their final weights.
        mean: what an ensemble averages at each token, "probabilities" (None) or "log_probabilities".

    Raises:
        UserError: `path` is not a run folder, holds no parameters or no checkpoint of `step`, or the mesh, the
            quantization or a run of the ensemble does not fit the model.
    """
    check_loaded(mesh, step, ensemble, mean)
    if mesh is None:
        trained = load_trained(as_path(path), None, step=step)
    else:
        parallel = read_mesh(mesh)
        device_mesh = make_mesh(parallel)
        trained = load_trained(as_path(path), device_mesh, step=step)
        try:
            rules.check_model(dataclasses.replace(trained.cfg, parallel=parallel), device_mesh.shape)
        except UserError as error:
            raise UserError(f"{path} does not fit the mesh {mesh!r} ({error}): write other sizes") from error
    cfg, model, params = run_folder.with_chosen_head(as_path(path), trained.cfg), trained.model, trained.params
    if quantization is not None:
        model, params = quantized_layout(model, params, quantization)
        cfg = dataclasses.replace(cfg, model=model.cfg, train=cfg.train.without_lora())
    run = Run(as_path(path), cfg, model, params, trained.tokenizers, trained.labels, step)
    others = [load(other, mesh=mesh, quantization=quantization) for other in ensemble]
    return _joined([run, *others], mean or MEANS[0]) if others else run


def _joined(runs: Sequence["Run"], mean: str) -> "Run":
    """Returns an ensemble of runs.

    Raises:
        UserError: the models do not decode, or differ in their tokens or in a setting that they must share.
    """
    first, *others = runs
    for other in others:
        check_member(first.config, other.config, str(other.path))
        pairs = (first.tokenizers.source, other.tokenizers.source), (first.tokenizers.target, other.tokenizers.target)
        if not all(mine.vocab_size == theirs.vocab_size and same_tokens(mine, theirs) for mine, theirs in pairs):
            raise UserError(
                f"{other.path} has another vocabulary than {first.path}: train it with data.tokenizer='file' and "
                f"data.tokenizer_file={str(resolved(first.path))!r}"
            )
    model, params = Ensemble(tuple(run.model for run in runs), mean), tuple(run.params for run in runs)
    return dataclasses.replace(first, model=model, params=params, ensemble=tuple(run.path for run in others))


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A trained model with its config and tokenizers.

    Methods raise UserError for a model of another family, an unknown setting, and an input that is not a text or
    is too long.
    """

    path: Path
    config: Config
    model: Any
    """The Linen module: `run.model.apply({"params": run.params}, ...)`."""
    params: Any
    tokenizers: Tokenizers
    labels: tuple[str, ...] | None
    """Class names of a classifier."""
    step: int | None = None
    """Step of the checkpoint that `load` was asked for; None: the final weights, or the newest checkpoint."""
    ensemble: tuple[Path, ...] = ()
    """Folders of the further runs of an ensemble; `params` is then a tuple of the parameters of all runs."""

    @property
    def task(self) -> Task:
        """The task that the model is trained for; a task of other code may have methods of its own."""
        return task_of(self.config)

    @property
    def history(self) -> dict[str, np.ndarray]:
        """The metrics by step, as columns of equal length: `pandas.DataFrame(run.history)`; see `curves.history`."""
        from tformer_jax.runs import curves

        return curves.history(self.path)

    def plot(self, *names: str) -> "Plot":
        """Draws metrics of `history` by step; default: the loss, and metrics of the validation split."""
        from tformer_jax.report.history_plot import plot_history

        return plot_history(self.history, names)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.config.model.family}, {optax.tree.size(self.params):,} parameters)"

    def _repr_html_(self) -> str:
        from tformer_jax.base.html_table import describe_html

        modules = f"<b>{html.escape(repr(self))}</b>" + describe_html(cost.by_module(self.params))
        return modules + self.config._repr_html_()

    @functools.cached_property
    def languages(self) -> Languages:
        """The languages of a translator, `run.languages.sources` and `targets`; () for a model of one direction."""
        return Languages(self.config.data, self.tokenizers)

    def translate(
        self,
        texts: Sequence[str | Request],
        *,
        to: LanguageNames = None,
        source_language: LanguageNames = None,
        seed: int = 0,
        **settings: Any,
    ) -> list[str]:
        """Translates texts, in order; a blank text gives a blank translation.

        Args:
            to: language to translate into, as a code or an English name, for all texts or for each; None: the only one.
            source_language: language of the texts, as `to`; needed only by models that are told it.
            seed: random seed of sampling.
            settings: fields of `DecodeConfig`, such as `beams=4` or `temperature=0.8`; default: the run's own.
        """
        self.require("translate")
        requests = make_requests(texts, to, source_language)
        return self.generator(self.decoding(settings))(self.params, requests, seed=seed)

    def generate(self, prompts: Sequence[str | Request], *, seed: int = 0, **settings: Any) -> list[str]:
        """Continues prompts, in order; a result does not repeat its prompt. Arguments are as for `translate`."""
        self.require("generate")
        return self.generator(self.decoding(settings))(self.params, make_requests(prompts), seed=seed)

    def chat(self, conversations: Iterable[Sequence[Message]], *, seed: int = 0, **settings: Any) -> list[str]:
        """Returns the assistant's next message of each conversation, by the chat template of the run.

        Args:
            conversations: messages such as `{"role": "user", "content": "Hello"}`, as in OpenAI's API.
            seed, settings: as for `translate`.
        """
        return self.generate(chat_requests(conversations), seed=seed, **settings)

    def outputs(
        self,
        texts: Sequence[str | Request],
        n: int,
        *,
        to: LanguageNames = None,
        source_language: LanguageNames = None,
        seed: int = 0,
        **settings: Any,
    ) -> list[list[Output]]:
        """Returns `n` outputs of each text with their scores: the best of beam search, best first, or samples.

        Args:
            n: outputs per text; beam search needs `beams` of at least `n`.
            to, source_language, seed, settings: as for `translate`.
        """
        self.require("outputs")
        requests = make_requests(texts, to, source_language)
        generator = self.generator(self.decoding(settings, outputs=n))
        return list(generator.stream(self.params, requests, seed=seed, outputs=n, scores=True))

    def classify(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        """Returns the most probable label of each text, and its probability; of a blank text "" and 0."""
        return self.classifier()(self.params, check_texts(texts))

    def fill_mask(self, texts: Sequence[str], *, top: int = 5) -> list[list[Fill]]:
        """Returns the `top` fills of the masks in each text, such as "a [MASK] film", the most probable one first."""
        return list(self.mask_filler(top=top).stream(self.params, check_texts(texts)))

    def score(
        self, examples: Sequence[Any], *, to: LanguageNames = None, source_language: LanguageNames = None
    ) -> list[Scored]:
        """Returns the log-probabilities of the tokens of each text, or of the target of each (source, target) pair.

        An example of a language model may be a pair (prompt, continuation): only the continuation is scored; or a
        `Chat`: only the assistant's messages are. The languages of pairs are given as for `translate`.
        """
        given = enumerate(several_texts(examples))
        texts: list[Any] = [each if isinstance(each, Chat) else example_parts(number, each) for number, each in given]
        if to is not None or source_language is not None:
            texts = with_languages(texts, to, source_language)
        return list(self.scorer().stream(self.params, texts))

    def logits(self, examples: Sequence[Any]) -> list[np.ndarray]:
        """Returns the logits of each text, or of the target of each (source, target) pair.

        An example of a language model may be a pair (prompt, continuation): a prefix LM attends to the prompt in both
        directions, as in generation, and to a single text causally.

        Returns:
            float32 [T, V] per example: row t predicts token t + 1 of a text (token t for a masked_lm), or token t of a
            target and its end; [classes] for a classifier.
        """
        self.require_head("logits")
        rows = [self._inputs(number, example) for number, example in enumerate(check_examples(examples))]
        key = self.model.inputs[-1]
        outputs = self._compute(_apply, rows)
        return [x if x.ndim == 1 else x[: len(row[key])] for x, row in zip(outputs, rows, strict=True)]

    def watch(self, examples: Iterable[Any]) -> Iterator[Watched]:
        """Yields intermediate values of the model for each text or pair, as for `logits`, in order.

        These are attention weights, norms of the residual stream and predictions by layer.
        """
        self.require_head("watch")
        self.require_single("watch")

        def run(rows: list[dict[str, list[int]]]) -> Iterator[Watched]:
            for watched, row in zip(self._compute(watch, rows), rows, strict=True):
                lengths = {key: len(ids) for key, ids in row.items()}
                yield without_padding(watched, type(self.model), lengths)

        size = WINDOW * self.config.eval.batch_size
        return run_in_chunks(check_examples(examples), self._inputs, run, size=size)

    def weight_shapes(self, example: Any) -> dict[str, tuple[int, int, int, int]]:
        """Returns the shapes of the attention weights that `watch` yields for an example, without computing them."""
        lengths = {key: len(ids) for key, ids in self._inputs(0, example_parts(0, example)).items()}
        return weight_shapes(self.config.model, lengths)

    def decoding(self, settings: Mapping[str, Any], outputs: int = 1, name: Callable[[str], str] = str) -> DecodeConfig:
        """Returns the run's decoding settings with changes, for a number of outputs per text.

        Several outputs select beam search for a translator, or sampling for a language model, unless the settings
        select a strategy.

        Args:
            settings: new values by name.
            name: formats a setting for error messages, for example as a flag.

        Raises:
            UserError: a setting is invalid, or the strategy does not give that number of outputs.
        """
        if not isinstance(outputs, int) or outputs < 1:
            raise UserError(f"{outputs!r} outputs per text: write an integer, at least 1")
        decode = self.config.decode.changed(settings, name)
        chosen = "strategy" in settings or settings.get("temperature") == 0
        if outputs > 1 and decode.strategy == "greedy" and not chosen:
            decode = decode.changed(
                {"beams": outputs} if self.config.model.model_class.reads_source else {"strategy": "sample"}
            )
        if outputs > 1 and decode.strategy == "greedy":
            raise UserError(f"greedy decoding has one output, not {outputs}")
        if decode.strategy == "beam" and outputs > decode.beams:
            raise UserError(f"{outputs} outputs need {name('beams')} of at least {outputs}")
        return decode

    def generator(self, decode: DecodeConfig) -> Translator | TextGenerator:
        """Returns the translator or text generator with these settings, which can stream any number of texts."""
        kind: Callable[..., Any] = Translator if self.config.model.model_class.reads_source else TextGenerator
        return kind(dataclasses.replace(self.config, decode=decode), self.model, self.tokenizers)

    def classifier(self) -> LabelClassifier:
        """Returns the classifier, which can stream any number of texts."""
        self.require("classify")
        if self.labels is None:
            raise UserError(f"{self.path} has no labels.json: its classification head is not trained")
        return LabelClassifier(self.config, self.model, self.tokenizers, self.labels)

    def mask_filler(self, *, top: int = 5) -> MaskFiller:
        """Returns the filler of masks, which can stream any number of texts; see `MaskFiller`."""
        self.require("fill_mask")
        return MaskFiller(self.config, self.model, self.tokenizers, top=top)

    def scorer(self) -> Scorer:
        """Returns the scorer, which can stream any number of texts or pairs."""
        self.require("score")
        return Scorer(self.config, self.model, self.tokenizers)

    def embedder(
        self, *, pooling: str | None = None, normalize: bool | None = None, prompt: str | None = None
    ) -> Embedder:
        """Returns the embedder, which can stream any number of texts; see `Embedder`."""
        self.require_single("embed")
        how: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "prompt": prompt}
        return Embedder(self.config, self.model, self.tokenizers, **how)

    def embed(
        self,
        texts: Sequence[str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> np.ndarray:
        """Returns the embeddings of texts, float32 [texts, D]; arguments are as for `Embedder`."""
        embedder = self.embedder(pooling=pooling, normalize=normalize, prompt=prompt)
        vectors = list(embedder.stream(self.params, check_texts(texts)))
        return np.stack(vectors) if vectors else np.zeros((0, self.config.model.dim), np.float32)

    def require(self, use: str) -> None:
        """Raises `UserError` if the task of the run has no `use`, such as "translate"."""
        task = task_of(self.config)
        if use not in task.verbs:
            hint = f"; use {task.verb}" if task.verb else ""
            raise UserError(f"{use}: {self.path} holds a {self.config.model.family} model{hint}")
        self.require_head(use)

    def require_head(self, use: str) -> None:
        """Raises `UserError` if `use` needs an output head and the model's head is not trained."""
        if self.config.embed.only:
            raise UserError(f"{use}: {self.path} has no trained output head and only embeds texts: use embed")

    def require_single(self, use: str) -> None:
        """Raises `UserError` if this is an ensemble, for which `use` has no meaning."""
        if self.ensemble:
            raise UserError(f"{use} needs a single run: leave out the other runs of the ensemble")

    def _compute(self, function: Callable[..., Any], rows: Sequence[dict[str, list[int]]]) -> Iterator[Any]:
        return compute_rows(function, self.model, self.params, rows, self.config.eval.batch_size)

    def _inputs(self, number: int, example: Sequence[Any]) -> dict[str, list[int]]:
        check_example(self.config.model, number, example)
        if not self.config.model.model_class.reads_source:
            return text_inputs(self.config.model, self.tokenizers.target, number, example)
        return self._pairs.encode_pair(LongTexts(), number, example).inputs

    @functools.cached_property
    def _pairs(self) -> Scorer:
        """Encodes pairs, for a translator of any task."""
        return Scorer(self.config, self.model, self.tokenizers)


@functools.partial(jax.jit, static_argnames="model")
def _apply(model: nn.Module, params: Any, batch: registry.Batch) -> jax.Array:
    return model.apply({"params": params}, **model.arguments(batch))  # type: ignore[return-value]
