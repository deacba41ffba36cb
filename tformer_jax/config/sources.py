"""The values of `data.source`, and which settings they use."""

GENERATED = ("cldr_translation", "cldr_language", "stdlib_text")
"""Generated sources, which need no files."""
FILES = ("tsv", "jsonl", "parquet", "tfds", "prepared")
TEXTS = ("stdlib_text", "text", "lines", *FILES[1:])
SOURCES = ("cldr_translation", "cldr_language", "parallel_lines", *dict.fromkeys((*TEXTS, *FILES)))
"""Values of `data.source`."""
FILE_SOURCES = {"source": ("parallel_lines", "text", "lines", *FILES)}
"""`used_by` of the settings that name files."""
FIELD_SOURCES = {"source": FILES}
"""`used_by` of `data.fields`."""
EXAMPLES = {
    "parallel_lines": "'train.{lang}.gz'",
    "text": "'book.txt'",
    "lines": "'texts/*.txt.zst'",
    "tsv": "'train.tsv'",
    "jsonl": "'train-*.jsonl.gz'",
    "parquet": "'train.parquet'",
    "tfds": "'train'",
    "prepared": "the folder that scripts/prepare_data.py wrote",
}
"""An entry of `data.train` by source."""
