"""How the C library gives out memory on the processor; imports nothing heavy, since it must come first.

XLA on CPU takes its temporary buffers anew in every step, and each page of them that is touched for the first time is a
fault: 15 to 30% of a small model's step. Where the C library is not glibc, or the system not Linux, nothing happens.
Memory on an accelerator is not concerned.
"""

import ctypes
import os
import re
import sys
from pathlib import Path

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""malloc asks for pages of 2 MB. glibc reads the variable once, when a process begins, and knows this from 2.35 on."""
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_ARENA_MAX": "1"}
"""What `keep_freed_memory` does, for a process that has not begun."""
_OPTION = re.compile(r"-[bBdEiIOPqRsSuvx]+|-[WX].+")
"""An option of the interpreter that is a word of its own and says nothing of what is run, as -c and -m do."""
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment() -> dict[str, str]:
    """The variables with which a new process has the allocator that suits this system, whatever it computes with."""
    return _HUGE_PAGES if _offers_huge_pages() else _KEPT


def begin_with_huge_pages() -> None:
    """Starts this program again, under the same process id, so that malloc asks the system for huge pages.

    Only where the system gives them to those who ask ("madvise", the default of many), and only once; a GLIBC_TUNABLES
    that is set already is left alone, and so is a process that is more than `python PROGRAM ...`: a program that is
    read from standard input could not be read again, and one that another calls would run its caller twice. Costs the
    start of an interpreter, some 20 ms.
    """
    if "GLIBC_TUNABLES" in os.environ or not _runs_a_file() or not _offers_huge_pages():
        return
    os.environ.update(_HUGE_PAGES)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees instead of handing it back and taking it again at the next step.

    For processes without huge pages. With them the faults are few, and a heap that keeps everything grows by another
    buffer or two in the first steps, until it has a hole that fits.
    """
    if "hugetlb" in os.environ.get("GLIBC_TUNABLES", "") or not _glibc():
        return
    mmap_max, trim_threshold, arena_max = -4, -1, -8  # the numbers of M_MMAP_MAX ... in malloc.h
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(arena_max, 1)


def _runs_a_file() -> bool:
    """Whether this process is the interpreter with its options, the file that is running now, and its arguments."""
    options, words = sys.orig_argv[1 : -len(sys.argv)], sys.orig_argv[-len(sys.argv) :]
    program = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return (
            words == sys.argv
            and all(map(_OPTION.fullmatch, options))
            and program is not None
            and os.path.samefile(words[0], program)
        )
    except OSError:
        return False


def _offers_huge_pages() -> bool:
    """Whether malloc can ask for huge pages here, and has to."""
    try:
        return "[madvise]" in _POLICY.read_text() and _glibc() >= (2, 35)
    except OSError:
        return False


def _glibc() -> tuple[int, ...]:
    """Its version; empty where the C library is another one."""
    try:
        version = ctypes.CDLL("libc.so.6").gnu_get_libc_version
    except (OSError, AttributeError):
        return ()
    version.restype = ctypes.c_char_p
    return tuple(int(part) for part in version().decode().split(".")[:2])
