"""How long every instruction ran, read from what JAX's profiler has written."""

import math
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

BEGIN = "profiled from here"
"""The mark in a trace before which nothing counts."""
_WRAPPERS = ("while", "call", "conditional")
"""Instructions whose time is that of others."""


class _Open:
    """Something that runs on a thread: an instruction, or a task that one has handed out."""

    def __init__(self, start: float, end: float, owner: str | None) -> None:
        self.start, self.end, self.owner = start, end, owner
        self.others = 0.0
        """Nanoseconds that others took meanwhile, on the same thread."""


def recorded_seconds(folder: Path) -> dict[str, float]:
    """Instruction -> seconds, summed over threads, in the newest trace in `folder`, from the mark `BEGIN` on.

    On the processor an instruction hands out tasks to other threads, and that of a plain product ends long before its
    tasks do. The profiler marks where a task is handed out (Record) and where it runs (StartRegion .. StopRegion): its
    time belongs to the instruction that handed it out.
    """
    from jax.profiler import ProfileData

    path = max(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    events = []
    for plane in ProfileData.from_file(str(path)).planes:
        for number, thread in enumerate(plane.lines):
            # On the host any thread may compute, whatever its name; a GPU has lines that sum others up.
            if plane.name.startswith("/host") or "XLA" in thread.name or "Stream" in thread.name:
                events += [(event.start_ns, -event.duration_ns, (plane.name, number), event) for event in thread.events]
    first = next(start for start, _, _, event in events if event.name == BEGIN)
    totals: dict[str, float] = defaultdict(float)
    running: dict[tuple[str, int], list[_Open]] = defaultdict(list)
    owners: dict[int, str | None] = {}

    def close(stack: list[_Open], now: float) -> None:
        done = stack.pop()
        taken = min(done.end, now) - done.start
        if done.owner is not None and done.start >= first:
            totals[done.owner] += taken - done.others
        if stack:
            stack[-1].others += taken

    for start, negative, place, event in sorted(events, key=itemgetter(0, 1)):
        stack, stats = running[place], dict(event.stats)
        while stack and stack[-1].end <= start:
            close(stack, start)
        if "hlo_op" in stats and not event.name.startswith(_WRAPPERS):
            stack.append(_Open(start, start - negative, event.name))
        elif event.name.endswith("::Record"):
            owners[stats["_p"]] = stack[-1].owner if stack else None
        elif event.name.endswith("::StartRegion"):
            stack.append(_Open(start, math.inf, owners.get(stats.get("_c", -1))))
        elif event.name.endswith("::StopRegion") and stack:
            close(stack, start)
    for stack in running.values():
        while stack:
            close(stack, min(stack[-1].end, start))
    return {name: taken / 1e9 for name, taken in totals.items()}
