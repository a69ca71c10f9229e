"""Whether a case became slower: today's figures beside those that are kept for the same processor."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.check.kept import Figure

TOLERANCE = 0.1
"""By more than this fraction a case must have become slower before it is said."""
_NOISIEST = 0.25
"""More than this is always said: a figure that was kept in a noisy minute must not hide everything."""


def change(kept: Figure, now: Figure) -> float:
    """Says how many times as long it takes now: as the clock says or beside the machine's own time, whichever is less.

    What we broke shows in both. A slower machine of the same name shows in the first alone, and products that happened
    to run faster in the second alone.
    """
    return min(now.seconds.low / kept.seconds.low, now.times / kept.times)


def limit(kept: Figure) -> float:
    """The largest `change` that is no news: 1.1, or as far as the kept turns lay apart themselves, but at most 1.25."""
    return 1 + min(max(TOLERANCE, kept.noise), _NOISIEST)


@dataclass(frozen=True)
class Verdict:
    """What is said of one case."""

    name: str
    kept: Figure | None
    looks: Sequence[Figure]
    """What was measured now: once, or twice where it looked slower at first."""

    @property
    def now(self) -> Figure:
        """The look that judges: the best one."""
        kept = self.kept
        return self.looks[0] if kept is None else min(self.looks, key=lambda look: change(kept, look))

    @property
    def change(self) -> float | None:
        """How many times as long it takes now; None where nothing is kept."""
        return None if self.kept is None else change(self.kept, self.now)

    @property
    def slower(self) -> bool:
        """Whether it became slower, at every look."""
        return self.kept is not None and change(self.kept, self.now) > limit(self.kept)

    @property
    def faster(self) -> bool:
        """Whether it became faster by as much, by the clock and beside the machine's own time."""
        if self.kept is None:
            return False
        kept, now = self.kept, self.now
        return max(now.seconds.low / kept.seconds.low, now.times / kept.times) < 1 / limit(kept)

    def __str__(self) -> str:
        if self.kept is None:
            return "nothing is kept"
        if self.slower:
            return f"SLOWER by {change(self.kept, self.now) - 1:.0%}"
        told = "faster" if self.faster else "as fast"
        return told if len(self.looks) == 1 else f"{told}, at a second look"
