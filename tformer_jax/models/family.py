"""What a class of models states of itself, so that other code asks it and compares no names of families."""

from collections.abc import Mapping
from typing import Any, ClassVar

from tformer_jax.special_tokens import PAD

Batch = Mapping[str, Any]


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
    classifies: ClassVar[bool] = False
    """Whether it has one label per row, of `num_classes`."""

    @staticmethod
    def arguments(batch: Batch) -> dict[str, Any]:
        """Returns the arguments of a call of the model on a batch."""
        return {"tokens": batch["tokens"], "padding_mask": batch["tokens"] != PAD, "right_padded": True}
