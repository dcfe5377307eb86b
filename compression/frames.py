"""Parts that several streams share: varints, and zstd frames of a size that both ends know.

zstandard is optional: with it some streams are smaller, without it all others are read and written.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from compression.errors import WireError

VARINT_MOST_BYTES = 9
_held = threading.local()  # a compressor must not be used by two threads at once


def varint_bytes(number: int) -> int:
    """Bytes of a number >= 0 as varint.

    >>> [varint_bytes(n) for n in (0, 127, 128, 2**28 - 1)]
    [1, 1, 2, 4]
    """
    return max(1, (number.bit_length() + 6) // 7)


def varint(number: int) -> bytes:
    """A number in 0 .. 2**63 - 1 as unsigned LEB128 in its shortest form."""
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: memoryview, what: str, least: int = 0, most: int = (1 << 63) - 1) -> tuple[int, int]:
    """(the number at the start of `data`, bytes read).

    Args:
        data: bytes from a peer; more may follow.
        what: whose number it is, as an error calls it.
        least, most: what it may be.

    Raises:
        WireError: it is cut off, not in its shortest form, longer than 63 bits, or out of its range.
    """
    number = 0
    for at in range(VARINT_MOST_BYTES):
        if at >= len(data):
            raise WireError(what, "ends within a number")
        number |= (data[at] & 127) << 7 * at
        if data[at] < 128:
            if at and not data[at]:
                raise WireError(what, "a number is not in its shortest form")
            if not least <= number <= most:
                raise WireError(what, f"{number}, expected {least} to {most}")
            return number, at + 1
    raise WireError(what, "a number is longer than 63 bits")


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


def can_read_frames() -> bool:
    """Whether zstandard is installed."""
    return _zstandard() is not None


def framed(plain: bytes) -> bytes | None:
    """Length and zstd frame (level 1, its content size stated), or None where zstandard is not installed."""
    zstandard = _zstandard()
    if zstandard is None:
        return None
    if not hasattr(_held, "compressor"):  # making one costs more than using it
        _held.compressor = zstandard.ZstdCompressor(level=1)
    frame = bytes(_held.compressor.compress(plain))
    return varint(len(frame)) + frame


def read_framed(data: memoryview, size: int, what: str) -> tuple[bytes, int]:
    """(the `size` bytes of a frame, bytes read); never allocates more than that.

    Raises:
        WireError: another content size, a broken frame, or no zstandard to read it with.
    """
    length, start = read_varint(data, what)
    frame = bytes(data[start : start + length])
    if len(frame) < length:
        raise WireError(what, f"{len(frame)} bytes left, the frame has {length}")
    zstandard = _zstandard()
    if zstandard is None:
        raise WireError(what, "needs zstandard, which is not installed: pip install zstandard")
    try:
        if zstandard.frame_content_size(frame) != size:
            raise WireError(what, f"the frame does not state its {size} bytes of content")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(what, f"no zstd frame: {error}") from None
    if len(plain) != size:
        raise WireError(what, f"{len(plain)} bytes of content, expected {size}")
    return bytes(plain), start + length
