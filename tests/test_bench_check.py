"""What `make bench-check` says of planted figures: slower, as fast, faster, unknown; and of damaged ones."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check import __main__ as check
from benchmarks.check.kept import Figure, Spread, file_name, read
from benchmarks.check.measure import Found
from benchmarks.check.verdicts import Verdict
from jax_tformer_comparison.machine import describe_machine

STEP, TOKEN = "training: a model", "decoding: a model"
Plant = Callable[..., list[str]]


def figure(seconds: float, machine: float = 1.0, noise: float = 0.05) -> Figure:
    """A case whose best turn took `seconds`, and the usual one more by the fraction `noise`."""
    return Figure(Spread((1 + noise) * seconds, seconds, 2 * (1 + noise) * seconds), Spread(machine, machine, machine))


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Makes the check measure given seconds: of every case those of its first look, then of its second."""

    def install(other_work: float = 0.0, **looks: list[float]) -> list[str]:
        """Returns the cases that were measured, in order."""
        cases = {"step": STEP, "token": TOKEN}
        asked: list[str] = []

        def part(name: str, given: Iterator[float]) -> Any:
            def measure(session: Any) -> Found:
                asked.append(name)
                return Found({name: figure(next(given))}, other_work)

            return measure

        measures = [part(cases[name], iter(seconds)) for name, seconds in looks.items()]
        monkeypatch.setattr(check, "parts", lambda wanted, *, quick: measures)
        return asked

    return install


@pytest.fixture
def kept(plant: Plant, tmp_path: Path) -> Path:
    """A file of kept figures: 1.0 s for a step, 0.01 s for a token."""
    plant(step=[1.0], token=[0.01])
    assert run(tmp_path, "--keep") == 0
    return tmp_path / "kept" / file_name(describe_machine("cpu"), quick=False)


def run(tmp_path: Path, *flags: str) -> int:
    return check.main(["--kept", str(tmp_path / "kept"), "--out", str(tmp_path / "check.json"), *flags])


def verdicts(tmp_path: Path) -> dict[str, str]:
    cases = json.loads((tmp_path / "check.json").read_text())["cases"]
    return {name: case["verdict"] for name, case in cases.items()}


@pytest.mark.parametrize(
    ("kept", "now", "said"),
    [
        (figure(1.0), figure(1.2), "SLOWER by 20%"),
        (figure(1.0), figure(1.09), "as fast"),
        (figure(1.0), figure(0.8), "faster"),
        # A slower machine, or a slow minute: what the machine does itself is slower by as much.
        (figure(1.0), figure(1.2, machine=1.2), "as fast"),
        # Products that ran faster by chance.
        (figure(1.0), figure(1.0, machine=0.8), "as fast"),
        (figure(1.0), figure(1.3, machine=1.1), "SLOWER by 18%"),
        # Kept turns that lay as far apart, or further apart than is believed.
        (figure(1.0, noise=0.2), figure(1.19), "as fast"),
        (figure(1.0, noise=0.2), figure(1.21), "SLOWER by 21%"),
        (figure(1.0, noise=2.0), figure(1.26), "SLOWER by 26%"),
    ],
)
def test_a_case_is_slower_where_the_clock_and_the_machine_say_so(kept: Figure, now: Figure, said: str) -> None:
    assert str(Verdict("a case", kept, [now])) == said


def test_what_looks_slower_twice_is_slower(
    kept: Path, plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kept.read_text()
    asked = plant(step=[1.3, 1.2], token=[0.01])
    assert run(tmp_path) == 1
    assert asked == [STEP, STEP, TOKEN]
    assert verdicts(tmp_path) == {STEP: "SLOWER by 20%", TOKEN: "as fast"}
    assert f"1 of 2 became slower: {STEP}" in capsys.readouterr().out
    # What became slower does not become what is kept.
    asked = plant(step=[1.2, 1.2], token=[0.01])
    assert run(tmp_path, "--keep") == 1
    assert kept.read_text() == before


def test_a_slow_minute_is_not_slower(kept: Path, plant: Plant, tmp_path: Path) -> None:
    asked = plant(step=[1.0], token=[0.02, 0.0105])
    assert run(tmp_path) == 0
    assert asked == [STEP, TOKEN, TOKEN]
    assert verdicts(tmp_path) == {STEP: "as fast", TOKEN: "as fast, at a second look"}


def test_figures_that_were_kept_20_percent_too_fast_or_too_slow(
    kept: Path, plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(kept.read_text())
    for factor, status, said in ((1 / 1.2, 1, "SLOWER by 20%"), (1.2, 0, "faster")):
        doctored = json.loads(json.dumps(whole))
        seconds = doctored["figures"][STEP]["figure"]["seconds"]
        doctored["figures"][STEP]["figure"]["seconds"] = {name: factor * value for name, value in seconds.items()}
        kept.write_text(json.dumps(doctored))
        plant(step=[1.0, 1.0], token=[0.01])
        assert run(tmp_path) == status
        assert verdicts(tmp_path) == {STEP: said, TOKEN: "as fast"}
    assert f"take its entry out of {kept}" in " ".join(capsys.readouterr().out.split())


def test_a_processor_of_which_nothing_is_kept(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").mkdir()
    plant(step=[1.0])
    assert run(tmp_path) == 0
    assert verdicts(tmp_path) == {STEP: "nothing is kept"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "no figures were kept for this processor" in shown
    assert "--keep keeps what this measures" in shown
    assert "hides" not in shown
    assert not list((tmp_path / "kept").iterdir())
    # Kept while others computed, it is a floor that holds nothing.
    plant(step=[1.0], other_work=0.4)
    assert run(tmp_path, "--keep") == 0
    assert "hides what becomes slower" in " ".join(capsys.readouterr().out.split())
    plant(token=[1.0])
    assert run(tmp_path) == 0
    assert "no figures were kept for any of these" in " ".join(capsys.readouterr().out.split())


def test_keeping_adds_what_is_new_and_says_what_is_gone(
    kept: Path, plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(kept.read_text())
    del whole["figures"][TOKEN]
    whole["figures"]["decoding: an older model"] = whole["figures"][STEP]
    whole["figures"][STEP]["versions"]["jax"] = "0.0.1"
    kept.write_text(json.dumps(whole))
    plant(step=[0.5], token=[0.02])
    assert run(tmp_path, "--keep") == 0
    found = read(kept)
    assert found.keys() == {STEP, TOKEN, "decoding: an older model"}
    assert (found[STEP].figure.seconds.low, found[TOKEN].figure.seconds.low) == (1.0, 0.02)
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured no longer: decoding: an older model" in shown
    assert "other versions, such as python" in shown
    assert "jax 0.0.1" in shown


def test_the_file_of_a_processor() -> None:
    machine = describe_machine("cpu")
    name, quick = (file_name(machine, quick=quick) for quick in (False, True))
    assert name.endswith(f"-{machine.cores}-cores.json")
    assert quick == f"quick-{name}"
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:40], "is damaged: it is not JSON"),
        (lambda text: text.replace('"median"', '"mean"', 1), "is not a valid Kept"),
        (lambda text: text.replace('"low": 1.0', '"low": 9.0'), "low 9.0, median 1.0 and high 1.0 are no spread"),
        (lambda text: text.replace('"low": 1.0', '"low": 0'), "expected them above 0"),
        (lambda text: "[]", "holds list"),
    ],
)
def test_damaged_figures_are_refused_before_anything_is_measured(
    kept: Path,
    plant: Plant,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[str], str],
    said: str,
) -> None:
    kept.write_text(damage(kept.read_text()))
    (tmp_path / "check.json").unlink()
    capsys.readouterr()
    assert (plant(step=[1.0]), run(tmp_path)) == ([], 2)
    error = capsys.readouterr().err
    assert said in error
    assert "--keep" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "check.json").exists()


def test_folders_and_devices_that_cannot_be(plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = plant(step=[1.0])
    assert run(tmp_path) == 2
    assert "which is no folder" in capsys.readouterr().err
    (tmp_path / "kept").write_text("")
    assert run(tmp_path, "--keep") == 2
    assert "cannot keep figures in" in capsys.readouterr().err
    assert run(tmp_path, "--device", "gpu") == 2
    assert "expected cpu" in capsys.readouterr().err
    assert not asked


@pytest.mark.deep
def test_quick_run(tmp_path: Path) -> None:
    """What it measures itself, on models of no size, beside figures that are far too fast."""
    assert run(tmp_path, "--quick", "--keep", "--part", "decoding") == 0
    (path,) = (tmp_path / "kept").iterdir()
    whole = json.loads(path.read_text())
    (token,) = whole["figures"]
    assert token == "decoding: gpt2, batch 2, 4 + 4 tokens"
    assert read(path)[token].figure.times > 1
    seconds = whole["figures"][token]["figure"]["seconds"]
    for name in seconds:
        seconds[name] /= 1000
    path.write_text(json.dumps(whole))
    assert run(tmp_path, "--quick", "--part", "decoding") == 1
    assert verdicts(tmp_path)[token].startswith("SLOWER")


@pytest.mark.deep
def test_quick_run_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "parts", lambda wanted, *, quick: list(check_parts(wanted, quick=quick))[:1])
    assert run(tmp_path, "--quick", "--keep", "--part", "training") == 0
    (path,) = (tmp_path / "kept").iterdir()
    (found,) = read(path).items()
    assert found[0] == "training: small gpt, 2 x 8 tokens, float32"
    assert found[1].figure.times > 1


check_parts = check.parts
