"""How much memory Python takes for something."""

import tracemalloc


def traced_peak(work):
    """The most bytes that are allocated at once while `work` runs, of those that Python knows of."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
