"""Settings of the embeddings of texts."""

import dataclasses
from typing import ClassVar

from tformer_jax.config import kinds
from tformer_jax.config.fields import ConfigError, Section, nearest, setting


@dataclasses.dataclass(frozen=True)
class EmbedConfig(Section):
    """How a text becomes a vector, as `embed.py`, `serve.py` and `Run.embed` compute it unless told otherwise."""

    path: ClassVar[str] = "embed"

    pooling: str = setting(
        "mean", "pooling of the last hidden states over the tokens of a text", choices=kinds.EMBEDDING_POOLINGS
    )
    normalize: bool = setting(False, "scale embeddings to length 1")
    max_length: int | None = setting(
        None, "maximum length of a text, in tokens with those around it; None: model.max_length", low=1
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
