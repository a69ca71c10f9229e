"""The families of Hugging Face models that we are held against: a file each, whose `ENTRIES` go into one table.

Every gate of the harness runs on every entry; see docs/adding-a-family.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from parity_tests.oracles.entry import Entry

_FILES = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
ENTRIES: dict[str, Entry] = {name: entry for file in _FILES for name, entry in getattr(file, "ENTRIES", {}).items()}
VARIANTS = [(name, variant) for name, entry in ENTRIES.items() for variant in entry.variants]
