"""What a startup gives back to the system."""

from __future__ import annotations

import sys

import pytest

from plait.loading.image.release import list_read_only, release_libraries


def test_libraries_are_left_to_the_page_cache_only_where_no_page_of_them_was_written() -> None:
    def mapping(start: int, rights: str, name: str, anonymous: int, swapped: int = 0) -> str:
        return (
            f"{start:x}-{start + 4096:x} {rights} 00000000 fe:00 260131                     {name}\n"
            f"Size:   8 kB\nPss_Dirty:   0 kB\nAnonymous:   {anonymous} kB\n"
            f"Swap:   {swapped} kB\nVmFlags: rd mr mw me \n"
        )

    smaps = (
        mapping(0x1000, "r--p", "/lib/a.so", 0)
        + mapping(0x2000, "r-xp", "/lib/a.so", 0)
        + mapping(0x3000, "r-xp", "/lib/written.so", 4)
        + mapping(0x9000, "r--p", "/lib/relocated.so", 4)
        + mapping(0x8000, "r-xp", "/lib/swapped.so", 0, swapped=4)
        + mapping(0x4000, "rw-p", "/lib/a.so", 0)
        + mapping(0x5000, "r-xp", "", 0)
        + mapping(0x6000, "r-xp", "[vdso]", 0)
        + mapping(0x7000, "r-xp", "/lib/with space.so", 0)
    )
    assert list(list_read_only(smaps)) == [(0x1000, 0x2000), (0x2000, 0x3000), (0x7000, 0x8000)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists mappings with their pages")
def test_libraries_run_on_after_they_were_released() -> None:
    release_libraries()
    assert sorted([3, 1, 2]) == [1, 2, 3]
