"""How the C library gives out memory on the processor; imports nothing heavy, since it must come first.

XLA on CPU takes its temporary buffers anew in every step, and each page of them that is touched for the first time is a
fault: 15 to 30% of a small model's step. Where the C library is not glibc, or the system not Linux, nothing happens.
Memory on an accelerator is not concerned.
"""

import ctypes
import os
import sys
from pathlib import Path

_KEPT = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:glibc.malloc.arena_max=1"
"""What `keep_freed_memory` does, for a process that has not begun. glibc reads the variable once."""
_HUGE_PAGES = f"glibc.malloc.hugetlb=1:{_KEPT}"
"""malloc also asks for pages of 2 MB (from glibc 2.35 on; before, that part says nothing)."""
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment() -> dict[str, str]:
    """The variables with which a new process has the allocator that suits this system, whatever it computes with."""
    policy = _policy()
    return {"GLIBC_TUNABLES": _HUGE_PAGES if "[madvise]" in policy else _KEPT}


def begin_with_huge_pages() -> None:
    """Starts this program again, under the same process id, so that malloc keeps what is freed, and in huge pages.

    Only where the system gives them to those who ask ("madvise", the default of many), and only once; a GLIBC_TUNABLES
    that is set already is left alone. Costs the start of an interpreter, some 20 ms.
    """
    if "GLIBC_TUNABLES" in os.environ or "[madvise]" not in _policy() or not _is_glibc():
        return
    os.environ["GLIBC_TUNABLES"] = _HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees instead of handing it back and taking it again at the next step.

    For processes that began without GLIBC_TUNABLES; memory that others would have in the meantime is worth less than
    the faults. A step of a translation model with 65 million parameters takes 1.4 s so, 1.6 s where huge pages are
    handed back and taken again, and 2.5 s where a virtual machine's host has taken them in the meantime.
    """
    if "GLIBC_TUNABLES" in os.environ or not _is_glibc():
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # the numbers of M_MMAP_MAX ... in malloc.h
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(arena_max, 1)


def _policy() -> str:
    """What the system does about huge pages: always, madvise or never, in brackets; empty where it does not say."""
    try:
        return _POLICY.read_text()
    except OSError:
        return ""


def _is_glibc() -> bool:
    try:
        ctypes.CDLL("libc.so.6").gnu_get_libc_version  # noqa: B018 (asks whether it is there)
    except (OSError, AttributeError):
        return False
    return True
