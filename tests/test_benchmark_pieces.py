"""The benchmarks of attention, start-up, input and profile as programs on models of no size: what they write."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import jax_tformer
from benchmarks import attention, input_pipeline
from benchmarks.profile import __main__ as profile
from benchmarks.profile.instructions import GROUPS, instructions
from benchmarks.startup import __main__ as startup
from jax_tformer.config import AttentionImplementation
from jax_tformer_comparison.sides import SideFailed

Program = Any


def figures_of(program: Program, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What a quick run of it writes; all numbers are finite, and every spread is in order."""
    out = tmp_path / "new" / "figures.json"
    assert program.main(["--quick", "--out", str(out), *arguments]) == 0
    report = json.loads(out.read_text())
    check(report)
    assert report["machine"]["versions"].keys() >= {"jax", "torch"}
    assert report["notes"]
    return report


def check(tree: Any) -> None:
    """Numbers are finite and not negative; the median of a spread lies within it."""
    if isinstance(tree, dict):
        if tree.keys() == {"median", "low", "high"}:
            assert tree["low"] <= tree["median"] <= tree["high"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            check(branch)
    elif isinstance(tree, int | float):
        assert math.isfinite(tree)
        assert tree >= 0


@pytest.mark.deep
def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = figures_of(attention, tmp_path)
    names = {*get_args(AttentionImplementation), "torch sdpa"} - {"auto"}
    assert [case["causal"] for case in report["cases"]] == [True, False]
    for case in report["cases"]:
        assert case["sides"].keys() | case["absent"].keys() == names
        assert case["sides"].keys() >= {"einsum", "torch sdpa"}
        for name, side in case["sides"].items():
            assert side["largest_difference"] < 1e-5, name
            for which in ("forward", "forward and backward"):
                assert side["seconds"][which]["low"] > 0
                assert side["of_bound"][which] > 0
    for name, reason in report["absent"].items():
        assert reason, name
    assert "torch sdpa" in capsys.readouterr().out


def test_work_of_attention() -> None:
    causal, full = (attention.Case(256, 128, 6, 64, causal, "float32") for causal in (True, False))
    # Two sequences, 6 heads; two products, each a multiplication and an addition.
    assert full.flops() == 2 * 2 * 2 * 6 * 64 * 128 * 128
    assert causal.flops() / full.flops() == pytest.approx((128 + 1) / (2 * 128))


@pytest.mark.deep
def test_startup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = figures_of(startup, tmp_path)
    assert 0 < report["nothing_seconds"]["median"] < report["help_seconds"]["median"]
    assert report["experiments"].keys() == {"python-docs"}
    found = report["experiments"]["python-docs"]
    for kind in ("cold", "warm"):
        assert 0 < found[kind]["own_first_step"]["median"] < found[kind]["first_step"]["median"]
        assert found[kind]["first_step"]["median"] < found[kind]["whole"]["median"]
        assert found[f"{kind}_over_torch"] > 0
    assert found["torch"]["first_step"]["median"] > found["torch"]["imports"]["median"] > 0
    chapters = report["chapters"]["warm"]
    for name in ("import jax", "tokenizer", "data", "initialisation: compile or load", "step: compile or load"):
        assert chapters[name] >= 0, name
    parts = sum(seconds for name, seconds in chapters.items() if name != "in all")
    assert parts >= chapters["in all"] * 0.999
    assert "chapter by chapter" in capsys.readouterr().out


def test_startup_says_which_program_fails(tmp_path: Path) -> None:
    programs, missing = startup.Programs(tmp_path, "cpu"), ["--data.path", str(tmp_path / "missing.txt")]
    with pytest.raises(SideFailed, match=r"train\.py text: .*missing\.txt"):
        programs.first_step("text", missing, "cold")


@pytest.mark.deep
def test_input_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = figures_of(input_pipeline, tmp_path)
    assert [case["name"] for case in report["cases"]] == ["python-docs", "dates", "masked-docs"]
    for case in report["cases"]:
        names = ["tokens_per_second", "step_tokens_per_second"]
        names += [f"{part}_microseconds" for part in ("make", "next", "check", "place")]
        assert all(case[name]["low"] > 0 for name in names)
    assert report["least_times_the_step"] == min(case["times_the_step"] for case in report["cases"])
    assert "times the step" in capsys.readouterr().out


@pytest.fixture
def odd_name() -> Iterator[None]:
    """This process is called otherwise than "python", as it is where the program `pytest` runs the tests."""
    name = Path("/proc/self/comm")
    before = name.read_text() if name.exists() else ""
    if before:
        name.write_text("somebody")
    yield
    if before:
        name.write_text(before)


@pytest.mark.deep
@pytest.mark.usefixtures("odd_name")
@pytest.mark.parametrize(
    ("model", "alone"), [("small gpt", "optimizer"), ("gpt2 decoding, batch 2", "choosing the token")]
)
def test_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, alone: str) -> None:
    report = figures_of(profile, tmp_path, "--model", model)
    (found,) = report["models"]
    assert tuple(found["groups"]) == GROUPS
    for group in ("projections: products", "attention: products", "norms", "loss and head", alone):
        assert found["groups"][group]["seconds"] > 0, group
    # More than all threads have: then some time was counted twice.
    assert sum(group["share"] for group in found["groups"].values()) == pytest.approx(1, abs=0.02)
    assert found["groups"]["other"]["share"] < 0.1
    assert len(found["expensive"]) == 10
    assert all(instruction["group"] in GROUPS for instruction in found["expensive"])
    shown = " ".join(capsys.readouterr().out.split())
    # Tables are copied without what stands around them.
    assert f"the most expensive instructions; {report['machine']['cores']} core" in shown


def test_profile_of_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["--quick", "--model", "gpt9"]) == 2
    assert "gpt9" in capsys.readouterr().err


def test_groups_of_instructions() -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.training_cases import small_gpt, tiny
    from jax_tformer.model.functional import transformer

    net = transformer(tiny(small_gpt()))
    tokens = jnp.zeros((2, 8), jnp.int32)
    compiled = jax.jit(net.apply).lower(net.shapes, tokens).compile()
    text = compiled.as_text() or ""
    found = instructions(text)
    products = [instruction for instruction in found.values() if instruction.opcode == "dot"]
    assert {product.group() for product in products} >= {"projections: products", "attention: products"}
    assert all(product.group() != "other" for product in products)
    of_layers = [product for product in products if product.group() == "projections: products"]
    assert of_layers
    for product in of_layers:
        callers = [function for _, function, _ in product.frames]
        assert product.source().startswith("layers.py:")
        assert callers.index("Linear.__call__") < callers.index("Block.__call__") < callers.index("Stack.__call__")
    # As a cache gives it that another checkout has filled.
    elsewhere = instructions(text.replace(str(Path(jax_tformer.__file__).parent), "/elsewhere/jax_tformer/jax_tformer"))
    assert [part.group() for part in elsewhere.values()] == [part.group() for part in found.values()]


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.deep)])
def test_products_of_a_step_of_decoding(rows: int) -> None:
    """XLA forgets where some of them come from: of those, the ones that read weights as they are belong to layers."""
    from benchmarks.profile.traced import Decoding
    from benchmarks.sides import draw_prompts
    from benchmarks.training_cases import small_gpt, tiny

    loop = Decoding(tiny(small_gpt()), draw_prompts(50, rows, 4), 4, "cpu")
    # Of a fusion, what is fused.
    fused = {id(part) for found in loop.instructions.values() for part in found.parts}
    groups = [
        found.group()
        for found in loop.instructions.values()
        if id(found) not in fused and "dot" in {part.opcode for part in found.parts or (found,)}
    ]
    # In each of two layers: query, key, value, output, two of the feed-forward layer; scores and values.
    assert sorted(groups) == 4 * ["attention: products"] + ["loss and head"] + 12 * ["projections: products"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number of at least 1; see"),
        (["--rounds", "two"], "argument --rounds: 'two' is not a whole number of at least 1; see"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        attention.main(arguments)
    told = capsys.readouterr()
    assert (stopped.value.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert told.err.startswith(f"python -m benchmarks.attention: error: {said}")
