"""The wheel holds no tests; all else that there is to say about the package is in pyproject.toml."""

from setuptools import setup
from setuptools.command.build_py import build_py

PARITY = {"__init__", "bridge", "cases", "program", "reference_loss"}
"""Of parity_tests, what `jax-tformer parity` and `jax-tformer compare` need; the rest are tests."""


class WithoutTests(build_py):
    """Leaves out what only pytest reads."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, path) of each module of a package."""
        found = super().find_package_modules(package, package_dir)
        return [row for row in found if package != "parity_tests" or row[1] in PARITY]


setup(cmdclass={"build_py": WithoutTests})
