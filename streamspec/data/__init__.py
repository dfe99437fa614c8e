"""Reads task data: JSON lines, JSON arrays, CSV, Parquet and `datasets`, in shapes known by their columns."""

from streamspec.data.examples import COLUMNS, Example, iterate_examples, read_examples, sample_examples
from streamspec.data.json_files import MAX_LINE
from streamspec.data.messages import Message
from streamspec.data.sources import count_rows, fingerprints

__all__ = [
    "COLUMNS",
    "MAX_LINE",
    "Example",
    "Message",
    "count_rows",
    "fingerprints",
    "iterate_examples",
    "read_examples",
    "sample_examples",
]
