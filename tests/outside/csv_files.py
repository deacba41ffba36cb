import csv
from collections.abc import Iterator
from pathlib import Path

from tformer_jax.config import kinds
from tformer_jax.data.corpora import Example
from tformer_jax.data.corpora.files import FileSource
from tformer_jax.data.corpora.lines import numbered_lines


class Csv(FileSource):
    """Comma-separated files; their first line names the columns."""

    examples = None
    entry = "'train.csv'"

    def read_file(self, path: Path) -> Iterator[Example]:
        rows = csv.DictReader(line for _, line in numbered_lines(path, self.bad, keep_ends=True) if line)
        for row in rows:
            if None in (*row, *row.values()):
                self.bad.reject(path, rows.line_num, "has more or fewer cells than the first line")
            else:
                yield {key: row.get(key) for key in self.keys}


kinds.CORPORA["csv"] = Csv
