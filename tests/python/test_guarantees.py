"""docs/guarantees.md names tests: they are there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.(?:py|cc)::[\w.]+)`", PAGE)))


def test_the_page_names_tests():
    assert len(NAMED) > 40


@pytest.mark.parametrize("named", NAMED)
def test_what_the_page_names_is_a_test(named):
    file, _, name = named.partition("::")
    text = (TESTS / file).read_text()
    if file.endswith(".cc"):
        suite, _, case = name.partition(".")
        assert re.search(rf"^TEST(_F|_P)?\({suite}, {case}\) \{{", text, re.MULTILINE)
    elif name.startswith("test_"):
        assert re.search(rf"^def {name}\(", text, re.MULTILINE)
    else:  # a scenario of several ranks, which the file lists
        assert f'"{name}"' in text
