"""Reading gzip and zstd files as streams of bytes."""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
from typing import IO, Any

PACKED = (".gz", ".zst")


def unpacked(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """The bytes of ``raw`` without its packing. Reading on raises EOFError or OSError where the file is damaged."""
    if suffix == ".gz":
        return gzip.open(raw, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BufferedReader(_Zstd(raw), 1 << 20)
    return raw


class _Zstd(io.RawIOBase):
    """Decompressed bytes of a file of zstd frames. Unlike the library's own reader it notices a file that is cut."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._input, self._ready = raw, b"", b""
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._input = self._input or self._raw.read(1 << 17)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle")
                return 0
            self._advance()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _advance(self) -> None:
        import zstandard

        self._frame = self._frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        given, self._input = self._input, b""
        try:
            self._ready = self._frame.decompress(given)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None


def on_disk(stream: IO[bytes]) -> IO[bytes]:
    """``stream`` as a file that can be read from any place: unpacked to disk, not to memory; gone when it is closed."""
    whole = tempfile.TemporaryFile()  # noqa: SIM115 (the caller reads it)
    shutil.copyfileobj(stream, whole, 1 << 20)
    whole.seek(0)
    return whole
