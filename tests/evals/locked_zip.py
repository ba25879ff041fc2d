"""Writes zip archives with a password, which Python's own module only reads (the cipher of PKWARE's APPNOTE, 6.1)."""

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path


def write_locked_zip(path: Path, files: Mapping[str, bytes], password: str) -> Path:
    """An archive of stored, encrypted files."""
    body, directory = b"", b""
    for name, content in files.items():
        check = zlib.crc32(content)
        data = _locked(bytes(11) + struct.pack(">I", check)[:1] + content, password.encode())
        facts = struct.pack("<HHHHHIIIHH", 20, 1, 0, 0, 0, check, len(data), len(content), len(name), 0)
        directory += b"PK\x01\x02" + struct.pack("<H", 20) + facts + struct.pack("<HHHII", 0, 0, 0, 0, len(body))
        directory += name.encode()
        body += b"PK\x03\x04" + facts + name.encode() + data
    count = len(files)
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)
    path.write_bytes(body + directory + end)
    return path


def _locked(content: bytes, password: bytes) -> bytes:
    keys = [0x12345678, 0x23456789, 0x34567890]

    def stir(byte: int) -> None:
        keys[0] = _crc(keys[0], byte)
        keys[1] = ((keys[1] + (keys[0] & 0xFF)) * 134775813 + 1) & 0xFFFFFFFF
        keys[2] = _crc(keys[2], keys[1] >> 24)

    for byte in password:
        stir(byte)
    found = bytearray()
    for byte in content:
        mixed = (keys[2] & 0xFFFF) | 2
        found.append(byte ^ (((mixed * (mixed ^ 1)) >> 8) & 0xFF))
        stir(byte)
    return bytes(found)


def _crc(crc: int, byte: int) -> int:
    # zlib's has its bits turned before and after, which the cipher has not.
    return zlib.crc32(bytes([byte]), crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
