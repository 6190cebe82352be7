"""Profiles of run time by length, and the selection of lengths."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from attnlens_analysis.errors import LengthError
from attnlens_analysis.profile import (
    PARTS,
    LengthProfile,
    Part,
    Profile,
    as_page,
    chart,
    chosen_lengths,
    describe_crossover,
    measure,
    parse_lengths,
    reliability,
)
from attnlens_analysis.profile import lengths as lengths_module
from attnlens_analysis.profile.measure import summary
from attnlens_analysis.profile.trace import Run
from attnlens_server.bundle import Bundle, open_bundle

pytest.importorskip("onnx")  # of the extra `export`


@pytest.fixture(scope="module")
def bundle(minilm_bundle: Path) -> Bundle:
    return open_bundle(minilm_bundle)


@pytest.fixture(scope="module")
def measured(bundle: Bundle) -> Profile:
    return measure(bundle, (16, 64))


def test_every_part_has_a_share_and_shares_sum_to_1(measured: Profile) -> None:
    assert [each.length for each in measured.lengths] == [16, 64]
    for each in measured.lengths:
        assert sum(each.shares.values()) == pytest.approx(1)
        assert list(each.shares) == list(PARTS)
        assert min(each.shares.values()) > 0
        assert 0 < sum(each.part_ms.values()) <= each.total_ms
        assert each.attention_share == pytest.approx(
            each.shares["scores"] + each.shares["softmax"] + each.shares["values"]
        )


def test_sizes_of_attention_maps_and_memory(measured: Profile) -> None:
    for each in measured.lengths:
        maps = 4 * 12 * each.length**2
        assert each.largest_bytes["scores"] == max(maps, 4 * 384 * each.length)
        assert each.largest_bytes["softmax"] == maps
        inner = 4 * 1536 * each.length
        assert each.largest_bytes["feed-forward"] == inner
        assert inner + 4 * 384 * each.length <= each.peak_bytes < 50 * inner


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("16..100", (16, 32, 64)), ("7", (7,)), ("100, 3,100", (3, 100)), ("5..10,64", (5, 10, 64))],
)
def test_lengths_are_lists_or_ranges_in_powers_of_2(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "0..4", "20..10", "a", "1,,2", "-3", "1..2..3", "16...32"])
def test_invalid_lengths_are_rejected(text: str) -> None:
    with pytest.raises(LengthError, match="invalid lengths"):
        parse_lengths(text)


def test_lengths_beyond_the_model_are_skipped_with_a_message(bundle: Bundle) -> None:
    kept, [message] = chosen_lengths(bundle, (256, 512, 513, 4096))
    assert kept == (256, 512)
    assert message == "skipped 513, 4,096 tokens: all-MiniLM-L6-v2 supports up to 512"
    with pytest.raises(LengthError, match=r"no length can be measured .* up to 512.*Use shorter lengths"):
        chosen_lengths(bundle, (1000,))


def test_lengths_beyond_the_memory_are_skipped(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths_module, "_available_bytes", lambda: 4_000_000)
    kept, [message] = chosen_lengths(bundle, (64, 128, 512))
    assert kept == (64, 128)
    assert "512 tokens (about 0.0 GB)" in message


def profile_with(*attention_shares: float) -> Profile:
    """Return a profile of the lengths 16, 32, 64, ... in which scores are the only attention part."""
    rest = dict.fromkeys(PARTS, 0.0)
    lengths = []
    for index, share in enumerate(attention_shares):
        parts: dict[Part, float] = {**rest, "scores": share, "feed-forward": 1 - share}
        lengths.append(LengthProfile(16 * 2**index, 1.0, parts, dict.fromkeys(PARTS, 0), 0))
    return Profile("<m&m>", "fp32", ("softmax",), 1, tuple(lengths))


@pytest.mark.parametrize(
    ("shares", "length"),
    [
        ((0.1, 0.2), None),
        ((0.6, 0.7), 16),
        ((0.4, 0.6), 23),  # 16 * sqrt(2)
        ((0.6, 0.4, 0.9), 37),  # 32 * 2 ** 0.2
        ((0.6, 0.4), None),
    ],
)
def test_length_at_which_attention_overtakes_other_parts(
    shares: tuple[float, ...], length: int | None
) -> None:
    assert profile_with(*shares).overtakes_at == length
    assert (str(length) in describe_crossover(profile_with(*shares))) == (length not in {None, 16})


def test_inconsistent_runs_are_reported() -> None:
    quiet, busy = (5.0, 5.0), (5.0, 35.0)
    steady = summary_of([quiet, quiet, (5.1, 5.0), quiet, quiet])
    disturbed = summary_of([quiet, busy, quiet, busy, (6.0, 5.0)])
    assert disturbed.shares == steady.shares  # same fastest runs
    assert reliability(Profile("m", "fp32", ("softmax",), 1, (steady,))) == ""
    profile = Profile("m", "fp32", ("softmax",), 1, (steady, disturbed))
    assert profile.unreliable_lengths == (64,)
    warning = reliability(profile)
    assert "at 64 tokens the runs disagree on shares by up to 38 percentage points" in warning
    assert warning in as_page(profile)


def summary_of(runs: Sequence[tuple[float, float]]) -> LengthProfile:
    """Summarize runs of one projection and one score node, after a warm-up run."""
    traced = [Run(sum(us), (("projections", us[0]), ("scores", us[1])), {}, 0) for us in ((9.0, 9.0), *runs)]
    return summary(64, traced)


def test_page_and_the_chart_are_well_formed_and_escaped() -> None:
    page = as_page(profile_with(0.1, 0.6))
    assert "<m&m>" not in page
    root = ET.fromstring(page.partition("\n")[2])
    assert root.tag.endswith("html")
    assert len(root.findall(".//{*}svg//{*}rect")) >= 2 * len(PARTS)
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http-equiv", "")
    ET.fromstring(chart(profile_with(0.1)))
