"""Reads Parquet files and Hugging Face `datasets`, saved or from the Hub, through their own libraries.

Tests: tests/core/data/test_sources.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from streamspec.data.json_files import Located
from streamspec.errors import DataError

BATCH = 1024  # rows
INSTALL = 'pip install "streamspec[data]"'


def parquet_rows(path: Path) -> Iterator[Located]:
    """Rows of a Parquet file."""
    file, number = _parquet(path), 0
    try:
        for batch in file.iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                number += 1
                yield without_nulls(row), f"{path}, row {number}"
    except (OSError, ValueError, NotImplementedError) as error:
        raise _damaged(path, error) from None


def parquet_length(path: Path) -> int:
    """Counts the rows of a Parquet file, by its own metadata."""
    return int(_parquet(path).metadata.num_rows)


def _parquet(path: Path) -> Any:
    parquet = library("pyarrow.parquet", str(path))
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError, NotImplementedError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: {error}", "a readable Parquet file", "write it again")


def dataset_rows(dataset: Any, name: str) -> Iterator[Located]:
    """Rows of a `datasets.Dataset`."""
    number = 0
    for batch in dataset.with_format(None).iter(batch_size=BATCH):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield without_nulls(dict(zip(batch, values, strict=True))), f"{name}, row {number}"


def saved_dataset(folder: Path, split: str | None) -> Any:
    """Loads a dataset that `save_to_disk` wrote; of one with splits, `split` or "train"."""
    datasets = library("datasets", str(folder))
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever its readers raise
        raise DataError(f"{folder}: {error}", "a folder that datasets.save_to_disk wrote", "write it again") from None
    if not isinstance(dataset, dict):
        if split is not None:
            raise DataError(f"{folder}: one dataset without splits", "its folder alone", f"drop :{split}")
        return dataset
    name = split or "train"
    if name not in dataset:
        raise DataError(f"{folder} has no split {name}", " or ".join(dataset), f"give {folder}:{next(iter(dataset))}")
    return dataset[name]


def hub_dataset(name: str, configuration: str | None, split: str | None) -> Any:
    """Loads a dataset from the Hugging Face Hub; `split` as the Hub names it, "train" by default."""
    datasets = library("datasets", f"{name}: no such file, but perhaps a dataset of the Hub")
    try:
        return datasets.load_dataset(name, configuration, split=split or "train")
    except Exception as error:  # network, names, formats: whatever its readers raise
        raise DataError(
            f"{name}: no file, and of the Hub: {type(error).__name__} {error}",
            "a file, a folder, or a dataset of the Hub as NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT",
            "check --data",
        ) from None


def library(module: str, wanted_for: str) -> Any:
    """Imports an optional library. Raises DataError that names it where it is missing."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise DataError(f"{wanted_for}, but no package {package}", f"the package {package}", INSTALL) from None


def without_nulls(value: Any) -> Any:
    """Removes the keys that Arrow adds to objects with fewer fields than others; a null content stays."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
