"""Shared fixtures of the evaluation tests."""

from tests.training.pictures import no_pictures  # noqa: F401
