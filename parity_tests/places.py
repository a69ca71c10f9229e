"""The table of places: of every fault whose place is known, what `first_difference` says.

`python -m parity_tests.places` asks about all of them (in about 2 minutes), prints a line each, and ends with 1 where
one is wrong or missed; `--docs docs/parity.md` writes the table there.
"""

import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import jax
import torch
import tyro

from parity import Difference
from parity.differ import first_difference
from parity.differ.alignment import match
from parity.report.figures import markdown_table
from parity_tests.localisation import CASES, asked
from parity_tests.other_pairs.planting import PAIRS
from parity_tests.tables import with_table


def unmatched(name):
    """(ours, theirs): how many values of an equal pair, between inputs and outputs, have no equal on the other side.

    They are steps within one formula that both sides compute in another order: a sum before it is divided, one fused
    product where the other side has three.
    """
    kept = []
    with patch.object(first_difference, "located", lambda sides, **_: kept.append(sides) or Difference("none")):
        asked(import_module(f"parity_tests.other_pairs.{name}").pair())
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        sides = kept[0].run_ours(False), kept[0].run_theirs(False)
    match(*sides)
    return tuple(
        sum(
            row.kind == "operation" and row.data and row.features is not None and values.leaf(number) is None
            for number in values.live() - values.equal.keys()
            for row in [values.rows[number]]
        )
        for values in sides
    )


def table(results):
    """Markdown: what was said of each fault."""
    rows = [
        [
            r.pair.replace("_", " "),
            r.fault,
            r.planted,
            r.verdict if r.verdict == "right" else f"**{r.verdict}**",
            _shown(r.difference.ours) or "; ".join(r.difference.parameters),
            _shown(r.difference.theirs),
            # Files are read from a folder that is gone.
            re.sub(r"[^\s(]*/(\w+\.py):\d+", r"\1", r.difference.kind or "").replace("|", "\\|"),
        ]
        for r in results
    ]
    return markdown_table(["pair", "fault", "planted in", "named", "JAX", "PyTorch", "what"], rows)


def _shown(site, longest=60):
    """A line and its module or function, in few words."""
    if site is None:
        return ""
    source = site.source if len(site.source) <= longest else f"{site.source[: longest - 4]} ..."
    about = site.module or site.function
    return " ".join(f"`{part}`" for part in (source.replace("|", "\\|"), about) if part)


def summary(results):
    """One line."""
    counted = Counter(result.verdict for result in results)
    words = ", ".join(f"{counted[verdict]} {verdict}" for verdict in ("right", "not sure", "wrong", "missed"))
    return f"{len(results)} faults: {words}"


def document(results):
    """What stands between the markers of the document."""
    rows = []
    for name in PAIRS:
        found = asked(import_module(f"parity_tests.other_pairs.{name}").pair())
        if found:
            raise AssertionError(f"{name} is called different: {found}")
        counts = [str(count) for side in zip(found.counts, unmatched(name), strict=True) for count in side]
        rows.append([name.replace("_", " "), *counts])
    header = ["equal pair", "values in JAX", "without an equal", "values in PyTorch", "without an equal"]
    return f"**{summary(results)}.**\n\n{table(results)}\n\n{markdown_table(header, rows)}"


def main(words: tyro.conf.Positional[tuple[str, ...]] = (), docs: Path | None = None) -> None:
    """Asks about all faults of known place, or about those whose pair or name has one of the words.

    Prints a line each, and ends with 1 where an answer is wrong or a fault missed. The table of all goes between its
    markers in `docs`.
    """
    chosen = [ask for case, ask in CASES.items() if any(word in case for word in words or [""])]
    if not chosen:
        sys.exit(f"no fault has one of the words {words}")
    if docs and words:
        sys.exit("--docs writes the whole table; leave out the words")
    torch.set_num_threads(1)
    results = []
    with jax.enable_x64(True):
        for ask in chosen:
            results.append(result := ask())
            print(f"{result.verdict:9} {result.pair}: {result.fault}", flush=True)
            if result.verdict != "right":
                print(result.difference)
        bad = any(result.verdict in ("wrong", "missed") for result in results)
        if docs and not bad:
            docs.write_text(with_table(docs.read_text("utf-8"), "places", document(results)), "utf-8")
    print(summary(results))
    sys.exit(bad)


if __name__ == "__main__":
    tyro.cli(main)
