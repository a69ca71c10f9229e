"""What is installed, as reports and capsules say it."""

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those packages that are installed, by name."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
