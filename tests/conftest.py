"""`golden(name, text)` compares a text with the file under review; `pytest --update-golden` writes the files anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew; the diff is the review")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{name} is not there yet: pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; if that is meant: pytest --update-golden"

    return check
