import csv
from collections.abc import Iterator
from pathlib import Path

from tformer_jax.config import kinds
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.files import FileSource


class Csv(FileSource):
    """Comma-separated files; their first line names the columns."""

    examples = None
    entry = "'train.csv'"

    def read_file(self, path: Path) -> Iterator[Example]:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                yield {key: row[key] for key in self.keys}


kinds.CORPORA["csv"] = Csv
