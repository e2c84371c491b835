"""Warnings worth saying once are said once; ranks other than 0 keep quiet below WARNING."""

import logging
from collections.abc import Iterator

import pytest

from moe_runtime.core.log import configure, get_logger, warn_once


@pytest.fixture
def package_level() -> Iterator[logging.Logger]:
    """The package's logger, with its level and the root's handlers put back after."""
    package, root = logging.getLogger("moe_runtime"), logging.getLogger()
    level, handlers = package.level, list(root.handlers)
    yield package
    package.setLevel(level)
    root.handlers[:] = handlers


def test_a_message_is_logged_once_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("moe_runtime.test_log")
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            warn_once(logger, "said once")
        warn_once(logger, "said once too")
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", "said once"),
        ("WARNING", "said once too"),
    ]
    assert caplog.records[0].name == "moe_runtime.test_log"


def test_two_loggers_each_say_it(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("moe_runtime.a", "moe_runtime.b", "moe_runtime.a"):
        warn_once(get_logger(name), "from each")
    assert [record.name for record in caplog.records] == ["moe_runtime.a", "moe_runtime.b"]


@pytest.mark.parametrize(("rank", "info"), [(0, True), (1, False), (7, False)])
def test_rank_0_says_more(rank: int, info: bool, package_level: logging.Logger) -> None:
    configure(rank)
    logger = get_logger("moe_runtime.somewhere")
    assert logger.isEnabledFor(logging.INFO) == info
    assert logger.isEnabledFor(logging.WARNING) and not logger.isEnabledFor(logging.DEBUG)


def test_records_go_to_standard_error_with_the_rank(
    package_level: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger().handlers.clear()
    configure(3)
    get_logger("moe_runtime.somewhere").warning("hot")
    captured = capsys.readouterr()
    assert "rank3 WARNING hot" in captured.err and captured.out == ""
