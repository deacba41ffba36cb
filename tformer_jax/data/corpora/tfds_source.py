"""The source of TFDS datasets, which imports TFDS when data is read, since that takes half a second."""

from pathlib import Path

from tformer_jax.config import Config, DataConfig
from tformer_jax.data.corpora.corpus import DIRECTIONS, FILE_SETTINGS, Corpus, Source


class Tfds(Source):
    """A dataset of TFDS; entries of `data.train` are splits."""

    settings = (*FILE_SETTINGS, *DIRECTIONS, "fields", "language_fields", "dataset", "filters")
    examples = None
    entry = "'train'"

    @staticmethod
    def check(data: DataConfig) -> None:
        """Raises `ConfigError` without a dataset, or for fields of several directions."""
        if data.dataset is None:
            raise data.error("dataset", "must name a dataset for data.source='tfds', such as 'wmt14_translate/de-en'")
        if data.fields and not data.language_fields and len({*data.directions, *data.zero_shot}) > 1:
            problem = "names one pair of fields for several directions: leave it out, for fields named by language"
            raise data.error("fields", f"{problem}, or set data.language_fields")

    @classmethod
    def files(cls, cfg: Config, root: Path | None) -> list[Path]:
        from tformer_jax.data.corpora import tfds

        return tfds.files(cfg, root)

    @classmethod
    def check_present(cls, cfg: Config, root: Path | None) -> None:
        from tformer_jax.data.corpora import tfds

        tfds.check_present(cfg, root)

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        from tformer_jax.data.corpora import tfds

        return tfds.load(cfg, root)
