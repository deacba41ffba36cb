"""Properties that a class of models declares, so that other code need not compare names of families."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from flax import errors

from tformer_jax.base.checks import check_type
from tformer_jax.base.errors import UserError
from tformer_jax.models import Batch
from tformer_jax.nn.masks import check_padding_mask
from tformer_jax.special_tokens import PAD


class Family:
    """Base of the model classes in `kinds.FAMILIES`: the batch keys that they read, and the parts that they have."""

    inputs: ClassVar[tuple[str, ...]] = ("tokens",)
    """Batch keys of the tokens that the model reads; the last one aligns with the logits."""
    labels: ClassVar[str] = "targets"
    """Batch key of the labels."""
    stacks: ClassVar[tuple[str, ...]] = ("encoder_layers",)
    """Settings of the depths of its stacks."""
    attentions: ClassVar[Mapping[str, tuple[str, str]]] = {"encoder": ("tokens", "tokens")}
    """Batch keys of the queries and of the keys of each attention."""
    input_name: ClassVar[str] = "text"
    """What the text that it reads is called."""
    reads_source: ClassVar[bool] = False
    """Whether an encoder reads a source that the decoder attends to."""
    decodes: ClassVar[bool] = False
    """Whether it has `decode_step`, which continues a sequence with a cache."""
    continues: ClassVar[bool] = False
    """Whether outputs continue the text that the model reads."""
    example: ClassVar[tuple[tuple[int, ...], str]] = ((1,), "one text")
    """Numbers of texts of an example for scores and logits, and what they are."""
    fills_masks: ClassVar[bool] = False
    """Whether it predicts masked tokens; the name of the mask token in a text is that token."""
    classifies: ClassVar[bool] = False
    """Whether it has one label per row, of `num_classes`."""

    def apply(self, variables: Any, *args: Any, **options: Any) -> Any:
        """As `flax.linen.Module.apply`; reports a mistake in the arguments in one sentence (`mistakes_explained`)."""
        with mistakes_explained(self, variables, args, options):
            return super().apply(variables, *args, **options)  # type: ignore[misc]

    def _repr_html_(self) -> str:
        from tformer_jax.base.html_table import describe_html
        from tformer_jax.models import cost, registry

        return describe_html(cost.by_module(registry.shapes(self)))

    @staticmethod
    def arguments(batch: Batch) -> dict[str, Any]:
        """Returns the arguments of a call of the model on a batch."""
        return {"tokens": batch["tokens"], "padding_mask": batch["tokens"] != PAD, "right_padded": True}


@contextlib.contextmanager
def mistakes_explained(model: Any, variables: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[None]:
    """Context of a model call that turns errors caused by a caller's mistake into `UserError`.

    Raises:
        UserError: token ids or masks have the wrong type, rank or size, ids are outside the vocabulary (checked only
            outside of compiled functions), or parameters or the key of dropout are missing.
    """
    check_type("variables", variables, Mapping, "a dictionary of collections, {'params': params}")
    if options.get("method") in (None, "__call__", "features"):
        _check_arguments(model, args, options)
    try:
        yield
    except errors.ScopeCollectionNotFound as error:
        problem = "variables have no collection 'params': call model.apply({'params': params}, ...)"
        if isinstance(variables, Mapping) and "params" in variables:
            problem = "the collection 'params' lacks a module of this model: are these the parameters of another one?"
        raise UserError(problem) from error
    except (errors.ScopeParamNotFoundError, errors.ScopeParamShapeError) as error:
        reason = str(error).partition(". (")[0].partition(" (http")[0]
        raise UserError(f"params do not fit this model: {reason}") from error


def _check_arguments(model: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises `UserError` for token ids and masks that do not fit the model."""
    with contextlib.suppress(TypeError):  # Python reports wrong numbers and names of arguments
        method = getattr(type(model), "features", type(model).__call__)
        given = inspect.signature(method).bind_partial(model, *args, **_own(options)).arguments
        for name in ("tokens", "source", "target"):
            if name in given:
                check_ids(name, given[name], model.cfg, source=name == "source")
                _check_padding(name, given, causal=name == "target" or model.continues)
        for name, mask in given.items():
            if name.endswith("padding_mask") and mask is not None:
                tokens = given.get(name.removesuffix("padding_mask").rstrip("_") or "tokens")
                check_padding_mask(name, mask, getattr(tokens, "shape", np.shape(mask)))
            if name.endswith("segments") and mask is not None:
                _check_segments(name, mask, given.get(name.removesuffix("segments").rstrip("_") or "tokens"))
        if "source" in given and "target" in given and len(given["source"]) != len(given["target"]):
            rows = f"{len(given['source'])} rows, but target has {len(given['target'])}"
            raise UserError(f"source has {rows}: pass pairs")


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of the model's call, without the options of `apply`."""
    apply = ("rngs", "method", "mutable", "capture_intermediates")
    return {name: value for name, value in options.items() if name not in apply}


def check_ids(name: str, ids: Any, cfg: Any, *, source: bool) -> None:
    """Raises `UserError` for token ids, called `name`, that a model does not read; `source` selects the vocabulary."""
    check_type(name, ids, (np.ndarray, jax.Array), "an integer array [batch, tokens], of NumPy or JAX")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{name} has the dtype {ids.dtype}: token ids are integers, such as int32")
    if ids.ndim != 2:
        hint = f", as {name}[None]" if ids.ndim == 1 else ""
        raise UserError(f"{name} has the shape {ids.shape}: pass [batch, tokens]{hint}")
    if ids.shape[1] > cfg.max_length:
        raise UserError(f"{name} has {ids.shape[1]} tokens per row, but model.max_length is {cfg.max_length}")
    size = cfg.source_vocab_size if source else cfg.vocab_size
    if isinstance(ids, jax.core.Tracer) or not ids.size or size is None:
        return
    low, high = int(np.min(ids)), int(np.max(ids))
    if low < min(PAD, 0) or high >= size:
        wrong = high if high >= size else low
        raise UserError(
            f"{name} has the id {wrong}, but the model's vocabulary has the ids 0 to {size - 1}, and {PAD} for padding"
        )


def _check_padding(name: str, given: Mapping[str, Any], *, causal: bool) -> None:
    """Raises `UserError` for padding that tokens attend to, because there is no mask; not in compiled functions."""
    stem, ids = "" if name == "tokens" else f"{name}_", given[name]
    masked = any(given.get(f"{stem}{end}") is not None for end in ("padding_mask", "segments"))
    if masked or isinstance(ids, jax.core.Tracer):
        return
    padding = np.asarray(ids) == PAD
    if (padding[:, :-1] & ~padding[:, 1:] if causal else padding).any():
        raise UserError(f"{name} has padding, {PAD}: pass {stem}padding_mask={name} != {PAD}")


def _check_segments(name: str, segments: Any, tokens: Any) -> None:
    if tokens is not None and getattr(segments, "shape", None) != tokens.shape:
        raise UserError(f"{name} has the shape {getattr(segments, 'shape', None)}, but its tokens have {tokens.shape}")
