"""What the gates refuse: a ParityError."""

import pytest

from parity import ParityError


def parity_error(pattern):
    """What is done within raises a ParityError in which `pattern` is found; yields what pytest knows of it."""
    return pytest.raises(ParityError, match=pattern)
