# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/ show what the layout and route code does now."""

from pathlib import Path

import pytest

from tools import draw_pictures

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_picture_is_up_to_date(name: str) -> None:
    drawn = draw_pictures.PICTURES[name]()
    assert (DOCS / f"{name}.svg").read_text() == drawn, "run python -m tools.draw_pictures"
