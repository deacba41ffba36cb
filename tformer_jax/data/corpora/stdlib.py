"""A text corpus available on every machine: the source code of the running Python's standard library."""

import sysconfig
from pathlib import Path

from tformer_jax.config import Config
from tformer_jax.data.corpora.corpus import TEXTS, Corpus, Example, Source
from tformer_jax.data.corpora.heldout import split_of

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}


class StdlibText(Source):
    """One document per module, sorted by path; a hash of the path determines the split."""

    examples = (TEXTS,)

    @classmethod
    def load(cls, cfg: Config, root: Path | None) -> Corpus:
        folder = Path(sysconfig.get_path("stdlib"))
        splits: dict[str, list[Example]] = {"train": [], "validation": [], "test": []}
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if not SKIPPED.intersection(relative.parts):
                try:
                    splits[split_of(relative.as_posix())].append({"text": path.read_text(encoding="utf-8")})
                except UnicodeDecodeError:
                    continue
        return Corpus(splits["train"], splits["validation"], splits["test"])
