"""How the tests run: compiled in a hurry, and shapes checked."""

import os
import zlib
from collections.abc import Iterator
from importlib.metadata import version

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
    """What `make parity-deep` and `make soak` ask for."""
    message = (
        "draw 3,000 random architectures from this seed, instead of 72 that are always the same; "
        "and take every Hugging Face model through gates 3, 4 and 8"
    )
    parser.addoption("--deep", type=int, metavar="SEED", help=message)
    message = "kill runs 200 times in one process and 50 times in two, at moments drawn from this seed"
    parser.addoption("--soak", type=int, metavar="SEED", help=message)


DEEPER = {
    "test_checkpoint_answers.py",
    "test_compare_checkpoint.py",
    "test_decoding_huggingface.py",
    "test_from_flax.py",
    "test_heads.py",
    "test_huggingface.py",
    "test_huggingface_sizes.py",
    "test_lora.py",
    "test_masked_models.py",
    "test_pretrained.py",
    "test_random_architectures.py",
    "test_soak.py",
    "test_beams_of_hugging_face",
    "test_every_benchmark_measures_all_of_its_sides_which_agree",
    "test_from_pairs_to_a_score",
    "test_gate_6_trajectory",
    "test_gates_1_and_2_over_several_blocks",
    "test_gates_3_and_4_in_the_other_cases",
    "test_gates_3_and_4_of_the_forward_pass",
    "test_generate_py_in_two_processes",
    "test_losses_and_gradients_are_those_of_whole_rows",
    "test_processes",
    "test_processes_whose_folders_differ_refuse_together",
    "test_the_commands_print_what_the_page_says",
    "test_the_two_terminals_of_the_page",
    "test_whether_reduce_scatter_of_gloo_is_right",
    "test_windows_and_prefixes_from_a_cache",
}
"""Files, and tests by name, of which what is deep is for `make test-deeper`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the deep tests that `.ci/run` has no time for: those that are slow, and most of the faults to be placed."""
    for item in items:
        placed = item.path.name == "test_localisation.py" and zlib.crc32(item.nodeid.encode()) % 5
        named = {item.path.name, getattr(item, "originalname", "")}
        if item.get_closest_marker("deep") and (placed or not named.isdisjoint(DEEPER)):
            item.add_marker("deeper")


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
