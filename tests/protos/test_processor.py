"""Whether the processor multiplies bf16, as the system's list of flags says."""

from pathlib import Path

import pytest

from attnlens.openvino import multiplies_bf16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 vnni\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx512f avx512_vnni\n", False),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("processor: 0\n", None),
    ],
)
def test_flags_tell_it_by_whole_words(text: str, expected: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert multiplies_bf16(path) is expected


def test_a_system_without_the_list_does_not_say_it(tmp_path: Path) -> None:
    assert multiplies_bf16(tmp_path / "none") is None
