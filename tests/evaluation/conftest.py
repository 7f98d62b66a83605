"""What the tests of evaluation share."""

from tests.training.pictures import no_pictures  # noqa: F401
