"""A file's checksum from its parts, in memory and on disk."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from megarl.weights.files.file_checksum import FileChecksum, checksum_of


def written(tmp_path, content: bytes):
    path = tmp_path / "file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 4097, 100_003, 5 * 4096])
def test_the_parts_of_a_file_have_its_checksum_however_it_is_cut(tmp_path, size):
    generator = random.Random(size)
    content = generator.randbytes(size)
    expected = checksum_of(written(tmp_path, content))
    cuts = sorted({0, size, *(generator.randint(0, size) for _ in range(9))})
    parts = [(start, content[start:stop]) for start, stop in pairwise(cuts)]
    generator.shuffle(parts)
    total = FileChecksum()
    for start, part in parts:
        total.add(start, torch.frombuffer(bytearray(part), dtype=torch.uint8))
    assert total.hex() == expected
    assert checksum_of(tmp_path / "file", from_disk=True) == expected


def test_any_changed_byte_and_any_swap_of_blocks_is_seen(tmp_path):
    content = random.Random(0).randbytes(3 * 4096 + 77)
    expected = checksum_of(written(tmp_path, content))
    for place in (0, 1, 4095, 4096, 8000, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 0x40
        assert checksum_of(written(tmp_path, bytes(changed))) != expected, place
    for size in (1, 8, 64, 4096):
        swapped = content[size : 2 * size] + content[:size] + content[2 * size :]
        assert checksum_of(written(tmp_path, swapped)) != expected, size
