"""A file of which some ranges are there."""

from __future__ import annotations

from pathlib import Path

from common.sparse_file import SparseFile, merged, missing

SIZE = 3 << 20
BLOCK = bytes(range(1, 129)) * 1024


def test_ranges_as_sets() -> None:
    assert merged([(5, 9), (0, 2), (8, 12), (2, 3)]) == [(0, 3), (5, 12)]
    assert merged([(0, 2), (4, 6), (20, 21)], gap=2) == [(0, 6), (20, 21)]
    assert missing([(0, 10), (20, 30)], [(2, 4), (8, 22)]) == [(0, 2), (4, 8), (22, 30)]
    assert missing([(3, 3), (1, 2)], [(0, 9)]) == []


def test_two_processes_fill_one_file_and_it_stays_sparse(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "model.gguf"
    one, other = SparseFile(path, SIZE), SparseFile(path, SIZE)
    one.put(0, BLOCK)
    other.put(len(BLOCK), BLOCK)
    other.put(2 << 20, BLOCK)
    expected = [(0, 2 * len(BLOCK)), (2 << 20, (2 << 20) + len(BLOCK))]
    assert one.have() == other.have() == SparseFile(path, SIZE).have() == expected
    data = path.read_bytes()
    assert len(data) == SIZE and data.startswith(BLOCK * 2) and not any(data[2 * len(BLOCK) : 2 << 20])
    assert path.stat().st_blocks * 512 < SIZE // 2


def test_a_file_that_is_lost_cut_or_made_anew_has_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for harm in ("lost", "cut", "new", "grown", "list"):
        SparseFile(path, SIZE).put(1 << 20, BLOCK)
        assert SparseFile(path, SIZE).have() == [(1 << 20, (1 << 20) + len(BLOCK))]
        if harm in ("lost", "new"):
            path.unlink()
        if harm in ("cut", "new", "grown"):
            with path.open("ab") as file:
                file.truncate({"cut": SIZE // 2, "new": SIZE, "grown": SIZE + 1}[harm])
        if harm == "list":
            path.with_suffix(".ranges").write_text("[[0, 1")
        again = SparseFile(path, SIZE)
        assert again.have() == [], harm
        again.put(0, BLOCK[:100])  # a file system keeps whole blocks: what lies beside it is not there by that
        assert SparseFile(path, SIZE).have() == [(0, 100)], harm
        path.unlink()


def test_only_the_damaged_part_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    SparseFile(path, SIZE).put(0, BLOCK)
    kept = path.read_bytes()[: len(BLOCK)]
    SparseFile(path, SIZE).put(2 << 20, BLOCK)
    path.unlink()
    with path.open("wb") as file:
        file.write(kept)
        file.truncate(SIZE)
    assert SparseFile(path, SIZE).have() == [(0, len(BLOCK))]
