"""Tests that reading a damaged zip file raises one of the listed errors."""

import io
import zipfile
from importlib.util import find_spec

import pytest

from loralib.io.archives import ZIP_ERRORS

METHODS = {
    "stored": (zipfile.ZIP_STORED, "zipfile"),
    "deflated": (zipfile.ZIP_DEFLATED, "zlib"),
    "lzma": (zipfile.ZIP_LZMA, "lzma"),
    "zstandard": (93, "compression"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_flipped_byte_raises_a_listed_error(name):
    method, module = METHODS[name]
    if find_spec(module) is None:
        pytest.skip("this Python is built without it")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("rows.tsv", "".join(f"{row}\t{row * row}\n" for row in range(999)))
    whole = file.getvalue()
    assert zipfile.ZipFile(io.BytesIO(whole)).read("rows.tsv").startswith(b"0\t0\n")
    end = whole.index(b"PK\x01\x02")  # of the compressed bytes
    # The last two seem to need more bytes than there are, and a password.
    flips = [*((place, 0xFF) for place in range(40, end, end // 20)), (29, 0xFF), (end + 8, 1)]
    for place, bits in flips:
        damaged = bytearray(whole)
        damaged[place] ^= bits
        with pytest.raises(ZIP_ERRORS):
            zipfile.ZipFile(io.BytesIO(damaged)).read("rows.tsv")
