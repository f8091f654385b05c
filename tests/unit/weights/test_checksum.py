"""Checksums: golden value, additivity over shards, and the corruptions that must change them."""

import itertools

import pytest
import torch

from megarl.weights import checksum as module
from megarl.weights.checksum import checksum, checksum_sum, move, numbers
from megarl.weights.region import whole
from megarl.weights.row_sums import ALL, MODULUS, Share, is_compiled


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request, monkeypatch):
    """Sums in compiled code, and as torch makes them where there is no compiler or on a device."""
    if request.param == "torch":
        monkeypatch.setattr(module, "is_compiled", lambda: False)
    elif not is_compiled():
        pytest.skip("no C compiler")
    return request.param


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def of(tensor: torch.Tensor) -> int:
    return checksum(tensor, whole(tuple(tensor.shape)))


def splitmix(index: int, seed: int) -> int:
    """The published generator (Steele et al. 2014), made odd."""
    x = (index * 0x9E3779B97F4A7C15 + seed) % MODULUS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return (x ^ (x >> 31)) | 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_is_that_of_the_formula_in_python_integers(dtype):
    for rows, columns in ((5, 7), (18, 7), (37, 8 * 40 // dtype.itemsize), (33, 8 * 40 // dtype.itemsize + 1)):
        tensor = random_tensor(rows, columns, dtype=dtype)
        size = dtype.itemsize
        lanes = 8 // size
        expected = 0
        for row, column in itertools.product(range(rows), range(columns)):
            bits = int.from_bytes(bytes(tensor[row, column].reshape(1).view(torch.uint8).tolist()), "little")
            word = column // lanes - row % 16 + 16
            factor = splitmix(row // 16, 0x243F6A8885A308D3) * splitmix(word, 0x13198A2E03707344)
            expected += (bits << (8 * size * (column % lanes))) * factor
        assert of(tensor) == expected % MODULUS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(0, 8, 24), (0, 3, 24), (0, 5, 6, 7, 24)])
def test_shards_add_up_whatever_the_cut(dtype, cuts):
    tensor = random_tensor(12, 24, dtype=dtype)
    total = 0
    for (a, b), (c, d) in itertools.product(itertools.pairwise((0, 5, 12)), itertools.pairwise(cuts)):
        total += checksum(tensor[a:b, c:d], ((a, b), (c, d)))
    assert total % MODULUS == of(tensor)


def test_shards_of_vectors_and_of_stacked_matrices_add_up():
    vector, stack = random_tensor(13), random_tensor(3, 4, 6)
    assert (checksum(vector[:5], ((0, 5),)) + checksum(vector[5:], ((5, 13),))) % MODULUS == of(vector)
    parts = [checksum(stack[i, j : j + 1][None], ((i, i + 1), (j, j + 1), (0, 6))) for i in range(3) for j in range(4)]
    assert sum(parts) % MODULUS == of(stack)


def test_shards_of_large_matrices_add_up_wherever_groups_of_rows_are_cut():
    tensor = random_tensor(200, 190, dtype=torch.bfloat16)
    for rows, columns in itertools.product(
        [(0, 16, 200), (0, 7, 90, 200), (0, 1, 199, 200)], [(0, 190), (0, 96, 190), (0, 3, 77, 190)]
    ):
        boxes = itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
        assert sum(checksum(tensor[a:b, c:d], ((a, b), (c, d))) for (a, b), (c, d) in boxes) % MODULUS == of(tensor)


def test_strides_do_not_matter():
    tensor = random_tensor(8, 6)
    assert of(tensor.T.contiguous().T) == of(tensor)
    assert of(torch.cat([tensor, tensor], 1)[:, :6]) == of(tensor)


def test_an_empty_piece_adds_nothing():
    assert checksum(torch.empty(0, 4), ((3, 3), (0, 4))) == 0


def test_large_tensors_are_summed_in_chunks_alike():
    tensor = random_tensor(3000, 701)
    parts = checksum(tensor[:, 1:], ((0, 3000), (1, 701))), checksum(tensor[:, :1], ((0, 3000), (0, 1)))
    assert sum(parts) % MODULUS == of(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_corruption_changes_it(dtype):
    tensor = random_tensor(16, 32, dtype=dtype)
    good = of(tensor)
    swapped_rows = tensor[torch.tensor([1, 0, *range(2, 16)])]
    far_rows = tensor[torch.tensor([8, *range(1, 8), 0, *range(9, 16)])]
    swapped_columns = tensor[:, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3, *range(8, 32)])]
    zeroed = tensor.clone()
    zeroed[3, 8:16] = 0
    stale = tensor.clone()
    stale[:8] = random_tensor(8, 32, dtype=dtype, seed=1)
    others = [
        swapped_rows,
        far_rows,
        swapped_columns,
        zeroed,
        stale,
        tensor.roll(1, 0),
        tensor.roll(1, 1),
        tensor.flip(1),
    ]
    assert good not in [of(other) for other in others]
    assert checksum(tensor, ((16, 32), (0, 32))) != good


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_single_flipped_bit_changes_it(dtype):
    tensor = random_tensor(2, 8, dtype=dtype)
    good = of(tensor)
    raw = tensor.view(torch.uint8)
    for row, byte, bit in itertools.product(range(2), range(raw.shape[1]), range(8)):
        raw[row, byte] ^= 1 << bit
        assert of(tensor) != good
        raw[row, byte] ^= 1 << bit
    assert of(tensor) == good


def test_the_scalar_form_is_the_same_number():
    tensor = random_tensor(4, 4)
    assert numbers([checksum_sum(tensor, whole((4, 4))), 3]) == [of(tensor), 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "box"), [
    ((3000, 512), ((0, 3000), (0, 512))),
    ((3000, 512), ((7, 2900), (64, 512))),
    ((3000, 512), ((7, 2900), (3, 500))),
    ((3000,), ((5, 2999),)),
    ((4, 900, 256), ((1, 4), (5, 900), (0, 256))),
])  # fmt: skip
def test_a_copy_gives_the_checksum_of_what_it_wrote(dtype, shape, box):
    whole_source = random_tensor(*shape, seed=3)
    source = whole_source[tuple(slice(*bounds) for bounds in box)]
    for place in (
        torch.empty(source.shape, dtype=dtype),
        torch.empty(shape, dtype=dtype)[tuple(slice(*b) for b in box)],
    ):
        for share in (ALL, Share(16, 5)):
            place.zero_()
            found = numbers([move(place, source, box, share)])[0]
            assert torch.equal(place, source.to(dtype))
            assert found == checksum(source.to(dtype), box, share)
        place.zero_()
        assert move(place, source, box, None) == 0
        assert torch.equal(place, source.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(0, 96), (5, 90), (3, 4), (16, 32), (30, 35)])
@pytest.mark.parametrize("every", [1, 3, 16])
def test_a_share_is_the_sum_over_its_groups_alone(dtype, rows, every):
    tensor = random_tensor(96, 41, dtype=dtype)[slice(*rows)]
    box = (rows, (3, 44))
    groups = range(rows[0] // 16, -(-rows[1] // 16))
    turns = min(every, len(groups))
    found = []
    for turn in range(turns):
        only = torch.zeros_like(tensor)
        for group in groups[turn::turns]:
            mine = slice(max(0, 16 * group - rows[0]), 16 * (group + 1) - rows[0])
            only[mine] = tensor[mine]
        found.append(checksum(tensor, box, Share(every, turn + 7 * turns)))
        assert found[-1] == checksum(only, box)
    assert sum(found) % MODULUS == checksum(tensor, box)


def test_a_share_sees_what_is_stale_in_every_box_of_enough_groups():
    tensor = random_tensor(400, 24)
    stale = random_tensor(400, 24, seed=1)
    for turn in range(16):
        assert checksum(tensor, whole((400, 24)), Share(16, turn)) != checksum(stale, whole((400, 24)), Share(16, turn))
    changed = tensor.clone()
    changed[250, 3] += 1
    seen = [
        t
        for t in range(16)
        if checksum(tensor, whole((400, 24)), Share(16, t)) != checksum(changed, whole((400, 24)), Share(16, t))
    ]
    assert seen == [250 // 16 % 16]


def test_the_two_ways_agree(monkeypatch):
    if not is_compiled():
        pytest.skip("no C compiler")
    for shape, box in (
        ((300, 77), ((40, 333), (5, 80))),
        ((3, 50, 16), ((2, 5), (7, 50), (0, 16))),
        ((19,), ((2, 19),)),
    ):
        tensor = random_tensor(*shape, dtype=torch.bfloat16)[tuple(slice(stop - start) for start, stop in box)]
        found = []
        for compiled in (True, False):
            monkeypatch.setattr(module, "is_compiled", lambda compiled=compiled: compiled)
            found.append([checksum(tensor, box, share) for share in (ALL, Share(2, 1), Share(16, 3))])
        assert found[0] == found[1]
