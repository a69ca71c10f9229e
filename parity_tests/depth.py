"""What only adds depth."""

import pytest


def deep(*values, **options):
    """Parameters of a test that `make test-deep` takes, and `make test` does not."""
    return pytest.param(*values, **options, marks=pytest.mark.deep)
