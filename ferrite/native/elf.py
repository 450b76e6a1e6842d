"""Object files of ELF, as far as others must know where functions are: read an object, write one that has names only.

`functions_in` finds where the functions of an object lie after it was loaded. An object exports some symbols, whose
addresses the loader tells: each gives away where its section starts. A kernel exports a table, not code; but words of
the table are addresses of code, and the object says of which, so what the loader wrote there tells where code starts.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_TABLE = numpy.dtype([("name", "<u4"), ("rest", "<u4"), ("value", "<u8"), ("size", "<u8")])  # of `_SYMBOL`

IDENTITY = b"\x7fELF\x02\x01\x01"  # of 64 bits, the lowest byte first
_FUNCTION, _EXECUTABLE, _GLOBAL = 2, 2, 1 << 4
_SYMBOLS, _STRINGS, _RELOCATIONS, _NO_BITS = 2, 3, 4, 8
_ALLOCATED, _CODE = 2, 4
_WORD = {62: 1, 183: 257}  # by machine, x86-64 and aarch64: the relocation that is a whole address
_FIRST_SPECIAL = 0xFF00  # from here on the number of a section stands for something else


@dataclass(frozen=True)
class Function:
    """Code in memory."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    kind: int
    section: int
    value: int
    size: int


def is_elf(data: bytes) -> bool:
    return data[: len(IDENTITY)] == IDENTITY


def functions_in(data: bytes, addresses: Mapping[str, int]) -> tuple[Function, ...]:
    """The functions of an object that was loaded, in order; `addresses`: of the symbols that it exports."""
    header = _HEADER.unpack_from(data)
    sections = _sections_of(data)
    symbols = next((_symbols(data, sections, each) for each in sections if each[1] == _SYMBOLS), [])
    starts = {
        each.section: addresses[each.name] - each.value for each in symbols if each.name in addresses and each.section
    }
    for section in sections:
        where = starts.get(section[7])
        if section[1] == _RELOCATIONS and where is not None:
            for offset, info, addend in _RELOCATION.iter_unpack(_content(data, section)):
                target = symbols[info >> 32]
                if info & 0xFFFFFFFF == _WORD.get(header[2]) and 0 < target.section < _FIRST_SPECIAL:
                    written = ctypes.c_uint64.from_address(where + offset).value
                    starts.setdefault(target.section, written - addend - target.value)
    found = [
        Function(each.name, starts[each.section] + each.value, each.size)
        for each in symbols
        if each.kind == _FUNCTION and each.section in starts
    ]
    return tuple(sorted(found, key=lambda function: function.address))


def _sections_of(data: Any) -> list[tuple[int, ...]]:
    """The headers of its sections."""
    header = _HEADER.unpack_from(data)
    return [_SECTION.unpack_from(data, header[6] + number * _SECTION.size) for number in range(header[12])]


def _content(data: Any, section: tuple[int, ...]) -> bytes:
    return data[section[4] : section[4] + section[5]]


def places_of(data: Any, names: Sequence[str]) -> dict[str, int]:
    """Where symbols of a library are, local ones too: a few of very many, so that only their own rows are read."""
    sections = _sections_of(data)
    found = {}
    for section in (each for each in sections if each[1] == _SYMBOLS):
        table = numpy.frombuffer(_content(data, section), _TABLE)
        start, length = sections[section[6]][4:6]
        for name in names:
            text = name.encode() + b"\0"
            place = data.find(text, start, start + length)
            while place >= 0 and name not in found:  # the end of a longer name looks the same
                for row in table[table["name"] == place - start][:1]:
                    found[name] = int(row["value"])
                place = data.find(text, place + 1, start + length)
    return found


def _symbols(data: bytes, sections: Sequence[tuple[int, ...]], table: tuple[int, ...]) -> list[_Symbol]:
    names = _content(data, sections[table[6]])
    found = []
    for name, info, _, section, value, size in _SYMBOL.iter_unpack(_content(data, table)):
        text = names[name : names.index(b"\0", name)].decode()
        found.append(_Symbol(text, info & 15, section, value, size))
    return found


def names_only(model: bytes, functions: Sequence[Function]) -> bytes:
    """An object that says where functions are, and has nothing in it: for the machine that `model` is for."""
    low = min(each.address for each in functions)
    high = max(each.address + each.size for each in functions)
    names, table = bytearray(b"\0"), bytearray(_SYMBOL.size)
    for each in functions:
        table += _SYMBOL.pack(len(names), _GLOBAL | _FUNCTION, 0, 1, each.address, each.size)
        names += each.name.encode() + b"\0"
    titles = b"\0.text\0.symtab\0.strtab\0.shstrtab\0"
    at, parts = _HEADER.size, (bytes(table), bytes(names), titles)
    places = [at, at + len(table), at + len(table) + len(names)]
    headers = [
        bytes(_SECTION.size),
        _SECTION.pack(titles.index(b".text"), _NO_BITS, _ALLOCATED | _CODE, low, at, high - low, 0, 0, 16, 0),
        _SECTION.pack(titles.index(b".symtab"), _SYMBOLS, 0, 0, places[0], len(table), 3, 1, 8, _SYMBOL.size),
        _SECTION.pack(titles.index(b".strtab"), _STRINGS, 0, 0, places[1], len(names), 0, 0, 1, 0),
        _SECTION.pack(titles.index(b".shstrtab"), _STRINGS, 0, 0, places[2], len(titles), 0, 0, 1, 0),
    ]
    body = b"".join(parts)
    body += bytes(-len(body) % 8)
    like = _HEADER.unpack_from(model)
    start = _HEADER.pack(
        like[0], _EXECUTABLE, like[2], like[3], 0, 0, at + len(body), like[7], _HEADER.size, 0, 0, _SECTION.size,
        len(headers), len(headers) - 1,
    )  # fmt: skip
    return start + body + b"".join(headers)
