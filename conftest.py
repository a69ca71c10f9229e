"""How the tests run: compiled in a hurry, and shapes checked."""

import os
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from itertools import compress

# Most of a test's time is compilation, and this makes it six times as short. What depends on optimised code (float32
# quality, models of full size) asks for it: see OPTIMISED in twin/pair.py.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):
    # See fusion_emitters in jax_tformer/startup.py, which may not be imported yet.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    # Each core has a test of its own; a program compiled in one piece takes a tenth less of it.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# On a GPU: kernels are not tried out one after the other, and several workers have room beside each other.
os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest
from jaxtyping import install_import_hook

# Before anything of ours is imported: from here on, every call of these modules checks its annotated shapes.
install_import_hook(["jax_tformer.model", "jax_tformer.decoding"], "beartype.beartype")
# A broadcast that nobody wrote down is a mistake waiting to happen.
jax.config.update("jax_numpy_rank_promotion", "raise")
# An accelerator multiplies float32 in fewer bits, as users have it; that is no matter of what these tests ask.
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make parity-deep`, `make soak` and `.ci/run` ask for."""
    message = (
        "draw 3,000 random architectures from this seed, instead of 72 that are always the same; "
        "and take every Hugging Face model through gates 3, 4 and 8"
    )
    parser.addoption("--deep", type=int, metavar="SEED", help=message)
    message = "kill runs 200 times in one process and 50 times in two, at moments drawn from this seed"
    parser.addoption("--soak", type=int, metavar="SEED", help=message)
    message = "every fourth case of each test: what .ci/run has time for"
    parser.addoption("--landing", action="store_true", help=message)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --landing, takes every fourth case of each test, from the second on: presets of all three architectures."""
    if config.getoption("landing"):
        tests = [item.nodeid.partition("[")[0] for item in items]
        cases, before, taken = Counter(tests), Counter[str](), list[bool]()
        for test in tests:
            taken.append(before[test] % 4 == min(1, cases[test] - 1))
            before[test] += 1
        config.hook.pytest_deselected(items=[item for item, take in zip(items, taken, strict=True) if not take])
        items[:] = compress(items, taken)


@pytest.fixture(scope="session", autouse=True)
def tokenizers_and_ids_are_made_anew() -> Iterator[None]:
    """Nothing is taken from the user's cache, and nothing put there, but for compiled programs: they save much time.

    Nothing is removed either: to look through thousands of files would take almost half of a small program's time.
    """
    from jax_tformer import startup
    from jax_tformer.data import sources, tokenizers

    with pytest.MonkeyPatch.context() as patch:
        for module in (sources, tokenizers):
            patch.setattr(module, "kept", lambda key, make: memoryview(make()))
        patch.setattr(startup, "bound_cache", lambda folder: None)
        yield
