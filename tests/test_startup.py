"""The C library's allocator keeps what is freed, unless the user has tuned it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
from jax_tformer.runs.startup import keep_freed_memory
keep_freed_memory()
import numpy
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(1 << 22)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
@pytest.mark.parametrize(("tuned", "faults_again"), [({}, False), ({"MALLOC_MMAP_THRESHOLD_": "65536"}, True)])
def test_freed_memory_is_kept(tuned, faults_again):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=kept | {"NUMPY_MADVISE_HUGEPAGE": "0"} | tuned,
    )
    assert (int(done.stdout) > 1000) is faults_again
