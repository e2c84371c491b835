"""Timelines: every bar where it belongs, and nothing drawn from bars that make no sense."""

from pathlib import Path

import pytest

from moe_runtime.report.timeline import Bar, write_timelines

BARS = [Bar("computes", "dgrad", 0.0, 4.0), Bar("computes", "waiting", 4.0, 9.0), Bar("travels", "exchange", 4.0, 9.0)]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_file_of_the_suffix_and_the_same_bytes_again(tmp_path: Path, suffix: str) -> None:
    first, again = tmp_path / f"first{suffix}", tmp_path / f"again{suffix}"
    for path in (first, again):
        write_timelines(path, {"inline": BARS, "late": BARS[:2]})
    assert first.stat().st_size > 2000
    assert first.read_bytes()[:4] == {".svg": b"<?xm", ".png": b"\x89PNG"}[suffix]


def test_an_svg_names_panels_lanes_and_kinds(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    write_timelines(path, {"late": BARS})
    text = path.read_text()
    for word in ("late", "computes", "travels", "dgrad", "wgrad", "exchange", "waiting", "milliseconds"):
        assert f"<!-- {word}" in text, word


def test_bars_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for bar in (Bar("computes", "sleep", 0.0, 1.0), Bar("computes", "dgrad", 2.0, 1.0)):
        with pytest.raises(ValueError, match=r"expected a kind among dgrad, .*, waiting and start <= stop"):
            write_timelines(tmp_path / "none.svg", {"inline": [bar]})
    assert not (tmp_path / "none.svg").exists()
