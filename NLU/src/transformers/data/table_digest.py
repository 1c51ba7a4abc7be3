"""Computes digests of tables of the `datasets` library, which differ if their rows do."""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # else imported by functions that get a table, which has imported it already
    import pyarrow as pa

_BLOCK = 10_000  # rows that are hashed at a time; the digest depends on it


def table_digest(data: Any) -> str | None:
    """Returns the SHA-256 of a table's rows, however they are stored: chunked, selected, formatted.

    Returns None for data sets of other kinds, which may draw other rows each time, and for tables
    of more than texts and numbers.
    """
    tables = sys.modules.get("datasets")
    if tables is None or not isinstance(data, tables.Dataset):
        return None
    digest, rows = hashlib.sha256(), data.with_format("arrow")
    try:
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            for name in sorted(block.column_names):
                _add(digest, name, _in_one(block.column(name)))
    except TypeError:
        return None
    return digest.hexdigest()


class LastDigest:
    """Remembers the digest of the last data set: computing it may take seconds."""

    def __init__(self) -> None:
        self._known: tuple[Any, str | None] = None, None

    def of(self, data: Any) -> str | None:
        """Returns `table_digest` of a data set."""
        if data is not self._known[0]:
            self._known = data, table_digest(data)
        return self._known[1]


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _add(digest: Any, name: str, values: pa.Array) -> None:
    """Adds an array's values to a digest, and nothing else that is in its buffers.

    Raises:
        TypeError: the array holds something else than texts and numbers.
    """
    import pyarrow as pa
    from pyarrow.compute import list_value_length

    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    digest.update(f"{name} {len(values)} {values.null_count} ".encode())
    if values.null_count:
        digest.update(_bytes_of(values.is_null()))
        values = values.drop_null()
    kind = values.type
    if pa.types.is_struct(kind):
        for field, part in zip(kind, values.flatten(), strict=True):
            _add(digest, field.name, part)
    elif _is_any(kind, "list", "large_list", "fixed_size_list"):
        digest.update(_bytes_of(list_value_length(values).cast(pa.int64())))
        _add(digest, "", values.flatten())
    elif _is_any(kind, "string", "large_string"):
        _add_texts(digest, values.cast(pa.large_string()))
    elif _is_any(kind, "integer", "floating", "boolean"):
        digest.update(_bytes_of(values))
    elif not pa.types.is_null(kind):
        raise TypeError(f"{name} holds {kind}")


def _is_any(kind: pa.DataType, *names: str) -> bool:
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _add_texts(digest: Any, texts: pa.LargeStringArray) -> None:
    from pyarrow.compute import binary_length

    digest.update(_bytes_of(binary_length(texts)))
    _, places, content = texts.buffers()
    if len(texts):
        ends = np.frombuffer(places, dtype=np.int64)[texts.offset :][: len(texts) + 1]
        digest.update(memoryview(content)[ends[0] : ends[-1]])


def _bytes_of(numbers: pa.Array) -> memoryview:
    return memoryview(numbers.to_numpy(zero_copy_only=False)).cast("B")
