"""Host and disk tiers: budgets, order, and files that prove what they are."""

import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache import disk, page_file
from deepinfer.cache.content import root_digest
from deepinfer.cache.disk import DiskTier
from deepinfer.cache.page_file import HEADER_BYTES, UnusableFileError, decode, encode
from deepinfer.cache.tiers import HostTier, TierStack
from deepinfer.core.errors import ConfigError

MODEL = root_digest("model")


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page(number: int, size: int = 10) -> bytes:
    return bytes([number]) * size


FILE = len(encode(MODEL, digest(0), page(0)))


def disk_tier(folder: Path, files: int = 100, identity: str = "model") -> DiskTier:
    return DiskTier(folder, identity, files * FILE)


def only_file(folder: Path) -> Path:
    (file,) = folder.rglob("*.page")
    return file


class TestHostTier:
    def test_gives_back_what_it_was_given(self) -> None:
        tier = HostTier(100)
        assert tier.put(digest(1), page(1)) == []
        assert tier.get(digest(1)) == page(1)
        assert digest(1) in tier
        assert digest(2) not in tier
        assert tier.get(digest(2)) is None

    def test_the_least_recently_used_leave_first(self) -> None:
        tier = HostTier(30)
        for number in (1, 2, 3):
            tier.put(digest(number), page(number))
        tier.get(digest(1))
        assert tier.put(digest(4), page(4, 20)) == [(digest(2), page(2)), (digest(3), page(3))]
        assert [entry[0] for entry in tier.drain()] == [digest(1), digest(4)]

    def test_storing_again_replaces_and_counts_as_use(self) -> None:
        tier = HostTier(20)
        tier.put(digest(1), page(1))
        tier.put(digest(2), page(2))
        assert tier.put(digest(1), page(7)) == []
        assert tier.get(digest(1)) == page(7)
        assert tier.put(digest(3), page(3)) == [(digest(2), page(2))]

    def test_a_page_larger_than_all_room_passes_through(self) -> None:
        tier = HostTier(9)
        assert tier.put(digest(1), page(1)) == [(digest(1), page(1))]
        assert len(tier) == 0

    @settings(max_examples=100, deadline=None)
    @given(puts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12))), budget=st.integers(0, 30))
    def test_the_budget_holds_and_nothing_vanishes(self, puts: list[tuple[int, int]], budget: int) -> None:
        tier = HostTier(budget)
        newest: dict[bytes, bytes] = {}
        for number, size in puts:
            newest[digest(number)] = page(number, size)
            leaving = tier.put(digest(number), page(number, size))
            for gone, data in leaving:
                assert newest.pop(gone) == data
            assert sum(len(data) for _, data in tier.drain()) <= budget
        assert dict(tier.drain()) == newest


class TestDiskTier:
    def test_gives_back_what_it_was_given(self, tmp_path: Path) -> None:
        tier = disk_tier(tmp_path)
        assert tier.put(digest(1), page(1)) == []
        assert tier.get(digest(1)) == page(1)
        assert digest(1) in tier
        assert digest(2) not in tier
        assert tier.get(digest(2)) is None
        assert tier.drain() == []

    def test_survives_a_restart(self, tmp_path: Path) -> None:
        disk_tier(tmp_path).put(digest(1), page(1))
        again = disk_tier(tmp_path)
        assert len(again) == 1
        assert again.get(digest(1)) == page(1)

    def test_models_do_not_mix(self, tmp_path: Path) -> None:
        disk_tier(tmp_path).put(digest(1), page(1))
        other = disk_tier(tmp_path, identity="another")
        assert len(other) == 0
        assert other.get(digest(1)) is None

    def test_two_processes_share_a_directory(self, tmp_path: Path) -> None:
        one, other = disk_tier(tmp_path), disk_tier(tmp_path)
        one.put(digest(1), page(1))
        assert digest(1) in other
        assert other.get(digest(1)) == page(1)

    def test_the_least_recently_used_files_are_deleted(self, tmp_path: Path) -> None:
        tier = disk_tier(tmp_path, files=2)
        tier.put(digest(1), page(1))
        tier.put(digest(2), page(2))
        tier.get(digest(1))
        tier.put(digest(3), page(3))
        assert [number for number in (1, 2, 3) if tier.get(digest(number))] == [1, 3]
        assert len(list(tmp_path.rglob("*.page"))) == len(tier) == 2

    def test_the_order_of_use_survives_a_restart(self, tmp_path: Path) -> None:
        tier = disk_tier(tmp_path)
        for number in (1, 2, 3):
            tier.put(digest(number), page(number))
        for age, number in enumerate((2, 3, 1)):
            os.utime(tier._path(digest(number)), (1000 + age, 1000 + age))
        smaller = disk_tier(tmp_path, files=2)
        smaller.put(digest(4), page(4))
        assert [number for number in (1, 2, 3, 4) if smaller.get(digest(number))] == [1, 4]

    def test_a_page_larger_than_all_room_leaves_no_file(self, tmp_path: Path) -> None:
        tier = disk_tier(tmp_path, files=1)
        tier.put(digest(1), page(1, 11))
        assert list(tmp_path.rglob("*.page")) == []

    def test_unfinished_files_are_removed_at_the_start(self, tmp_path: Path) -> None:
        folder = only_folder(tmp_path)
        (folder / "half.tmp").write_bytes(b"half a page")
        disk_tier(tmp_path)
        assert list(folder.iterdir()) == []

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        folder = only_folder(tmp_path)
        for name in ("notes.txt", "zz.page", "xy" * 32 + ".page"):
            (folder / name).write_bytes(b"not ours")
        tier = DiskTier(tmp_path, "model", 0)
        tier.put(digest(1), page(1))
        assert len(list(folder.iterdir())) == 3

    def test_a_directory_that_cannot_be_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(ConfigError, match="takes a directory that can be written to"):
            disk_tier(tmp_path / "file")


def only_folder(directory: Path) -> Path:
    """The folder of the model in a tier's directory, made by the tier itself."""
    disk_tier(directory)
    (folder,) = directory.iterdir()
    return folder


def torn(content: bytes) -> bytes:
    return content[:-3]


def header_only(content: bytes) -> bytes:
    return content[: HEADER_BYTES - 1]


def longer(content: bytes) -> bytes:
    return content + b"x"


def corrupt(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def no_page_file(content: bytes) -> bytes:
    return b"PK" + content[2:]


def another_page(content: bytes) -> bytes:
    return encode(MODEL, digest(99), page(1))


def another_model(content: bytes) -> bytes:
    return encode(root_digest("another"), digest(1), page(1))


def another_version(content: bytes) -> bytes:
    return content[:8] + (2).to_bytes(4, "little") + content[12:]


FAULTS = {
    torn: "it holds 7 of 10 bytes",
    header_only: "it is no page file, or only the start of one",
    longer: "it holds 11 of 10 bytes",
    corrupt: "its checksum does not fit",
    no_page_file: "it is no page file",
    another_page: "it holds another page",
    another_model: "it belongs to another model",
    another_version: "its format version is 2; this engine reads 1",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
class TestBadFiles:
    def test_is_skipped_with_one_warning_and_replaced(self, fault: object, message: str, tmp_path: Path) -> None:
        assert callable(fault)
        tier = disk_tier(tmp_path)
        tier.put(digest(1), page(1))
        file = only_file(tmp_path)
        file.write_bytes(fault(file.read_bytes()))
        with pytest.warns(RuntimeWarning, match=message) as caught:
            assert [tier.get(digest(1)), tier.get(digest(1))] == [None, None]
        assert len(caught) == 1
        assert str(file) in str(caught[0].message)
        assert digest(1) not in tier
        tier.put(digest(1), page(5))
        assert digest(1) in tier
        assert tier.get(digest(1)) == page(5)

    def test_is_found_after_a_restart_too(self, fault: object, message: str, tmp_path: Path) -> None:
        assert callable(fault)
        disk_tier(tmp_path).put(digest(1), page(1))
        file = only_file(tmp_path)
        file.write_bytes(fault(file.read_bytes()))
        with pytest.warns(RuntimeWarning, match=message):
            assert disk_tier(tmp_path).get(digest(1)) is None
        assert file.exists(), "it may be somebody else's"


class Trouble:
    """A disk that fails."""

    def __call__(self, *arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")


def test_a_page_that_cannot_be_written_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk_tier(tmp_path)
    tier.put(digest(1), page(1))
    monkeypatch.setattr(disk.os, "replace", Trouble())
    with pytest.warns(RuntimeWarning, match="cannot be written: .*No space left"):
        assert tier.put(digest(2), page(2)) == []
    assert digest(2) not in tier
    assert tier.get(digest(1)) == page(1)
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".page"], "no half-written file is left"
    monkeypatch.undo()
    tier.put(digest(2), page(2))
    assert tier.get(digest(2)) == page(2)


def test_a_page_that_cannot_be_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk_tier(tmp_path)
    tier.put(digest(1), page(1))
    monkeypatch.setattr(Path, "read_bytes", Trouble())
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert tier.get(digest(1)) is None


def test_a_file_that_cannot_be_deleted_does_not_stop_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk_tier(tmp_path, files=1)
    tier.put(digest(1), page(1))
    monkeypatch.setattr(Path, "unlink", Trouble())
    with pytest.warns(RuntimeWarning, match="cannot be deleted"):
        tier.put(digest(2), page(2))
    assert tier.get(digest(2)) == page(2)
    assert len(tier) == 1


def test_a_file_removed_by_someone_else_is_a_plain_miss(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    tier.put(digest(1), page(1))
    only_file(tmp_path).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tier.get(digest(1)) is None
    assert len(tier) == 0


class TestPageFile:
    @settings(max_examples=50, deadline=None)
    @given(data=st.binary(max_size=200))
    def test_any_page_comes_back(self, data: bytes) -> None:
        assert decode(MODEL, digest(1), encode(MODEL, digest(1), data)) == data

    @settings(max_examples=300, deadline=None)
    @given(at=st.integers(0, FILE - 1), flip=st.integers(1, 255))
    def test_any_changed_byte_is_noticed(self, at: int, flip: int) -> None:
        file = bytearray(encode(MODEL, digest(1), page(1)))
        file[at] ^= flip
        with pytest.raises(UnusableFileError):
            decode(MODEL, digest(1), bytes(file))

    @pytest.mark.parametrize("length", range(0, FILE, 7))
    def test_any_start_of_a_file_is_noticed(self, length: int) -> None:
        with pytest.raises(UnusableFileError):
            decode(MODEL, digest(1), encode(MODEL, digest(1), page(1))[:length])

    @settings(max_examples=100, deadline=None)
    @given(file=st.binary(max_size=300))
    def test_bytes_of_any_kind_are_no_page(self, file: bytes) -> None:
        with pytest.raises(UnusableFileError):
            decode(MODEL, digest(1), file)

    def test_the_header_is_as_described(self) -> None:
        file = encode(MODEL, digest(1), page(1))
        assert file[:8] == page_file.MAGIC
        assert int.from_bytes(file[8:12], "little") == page_file.VERSION == 1
        assert file[12:44] == MODEL
        assert file[44:76] == digest(1)
        assert int.from_bytes(file[76:84], "little") == 10
        assert file[HEADER_BYTES:] == page(1)


class TestStack:
    def test_what_one_tier_has_no_room_for_goes_to_the_next(self) -> None:
        upper, lower = HostTier(10), HostTier(10)
        stack = TierStack([upper, lower])
        for number in (1, 2):
            stack.put(digest(number), page(number))
        assert stack.get(digest(2)) == (page(2), "host")
        assert digest(1) in lower
        stack.put(digest(3), page(3))
        assert digest(1) not in stack
        assert (digest(3) in upper, digest(2) in lower) == (True, True)

    def test_names_the_tier_that_had_it(self, tmp_path: Path) -> None:
        lower = disk_tier(tmp_path)
        stack = TierStack([HostTier(10), lower])
        stack.put(digest(1), page(1))
        stack.put(digest(2), page(2))
        assert stack.get(digest(1)) == (page(1), "disk")
        assert stack.get(digest(2)) == (page(2), "host")
        assert stack.get(digest(3)) is None

    def test_persisting_leaves_nothing_to_lose(self, tmp_path: Path) -> None:
        stack = TierStack([HostTier(20), disk_tier(tmp_path)])
        for number in (1, 2, 3):
            stack.put(digest(number), page(number))
        stack.persist()
        later = disk_tier(tmp_path)
        assert [later.get(digest(number)) for number in (1, 2, 3)] == [page(1), page(2), page(3)]

    def test_persisting_writes_nothing_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stack = TierStack([HostTier(20), disk_tier(tmp_path)])
        stack.put(digest(1), page(1))
        stack.persist()
        monkeypatch.setattr(disk.os, "replace", Trouble())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stack.persist()

    def test_no_tiers_hold_nothing(self) -> None:
        stack = TierStack()
        assert not stack
        stack.put(digest(1), page(1))
        stack.persist()
        assert stack.get(digest(1)) is None
        assert digest(1) not in stack
