"""Fixtures: captures of small models by two engines, as the tests of bisecting have them."""

from tests.bisect.conftest import clean, clean_llama

__all__ = ["clean", "clean_llama"]
