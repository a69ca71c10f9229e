"""What a user gets wrong is refused: an InputError, in one line."""

from contextlib import contextmanager

import pytest

from jax_tformer import InputError


@contextmanager
def refused(pattern):
    """What is done within is refused with a line in which `pattern` is found; yields what pytest knows of it."""
    with pytest.raises(InputError, match=pattern) as error:
        yield error
    assert "\n" not in str(error.value)
