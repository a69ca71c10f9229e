"""`python -m parity judge`: figures where all is green; one line, and a status that says which, where it is not."""

from pathlib import Path

import pytest

from parity import record
from parity.__main__ import main
from parity_tests.capsule_pair import INPUTS, ours, parameters

HERE = "parity_tests.capsule_pair"


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ours."""
    folder = tmp_path_factory.mktemp("capsules") / "jax"
    return str(record(folder, ours, INPUTS, params=parameters(), gates=["1", "2"]))


def test_green(capsule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", capsule, f"{HERE}:ours"]) == 0
    assert main(["judge", capsule, f"{HERE}:module()", "--weights", f"{HERE}:WEIGHTS", "--gates", "9", "1"]) == 0
    own = [f"{HERE}:ours", "--params", f"{HERE}:parameters()", "--own-weights"]
    assert main(["judge", capsule, *own]) == 0
    gates = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert gates == ["9", "1", "2", "9", "1", "9", "1", "2"]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ([f"{HERE}:wrong"], 1, f"{HERE}:wrong: gate 1 activations: "),
        ([f"{HERE}:missing"], 2, "has no attribute 'missing'"),
        (["nowhere:side"], 2, "nowhere:side: ModuleNotFoundError: No module named 'nowhere'"),
        (["nowhere.py:side"], 2, "nowhere.py:side: UsageError: there is no file nowhere.py"),
        (["side"], 2, "'side' names nothing; expected MODULE:NAME or FILE.py:NAME"),
        ([f"{HERE}:INPUTS"], 2, "expected a function of JAX or a torch.nn.Module"),
        ([f"{HERE}:module()"], 2, "weights has to say which of the module's numbers"),
        ([f"{HERE}:ours", "--gates", "7"], 2, "the capsule has no gates ['7']"),
        ([f"{HERE}:ours", "--params", f"{HERE}:module(1)"], 2, "has no attribute 'module(1)'"),
    ],
)
def test_one_line_where_it_is_not(
    capsule: str, capsys: pytest.CaptureFixture[str], given: list[str], status: int, said: str
) -> None:
    assert main(["judge", capsule, *given]) == status
    line = capsys.readouterr().err
    assert said in line
    assert len(line.splitlines()) == 1


def test_a_capsule_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(tmp_path / "none"), f"{HERE}:ours"]) == 2
    assert "there is no capsule" in capsys.readouterr().err


def test_a_side_may_stand_in_a_file(capsule: str, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(f"from {HERE} import ours\n\n\nclass Port:\n    block = staticmethod(ours)\n")
    assert main(["judge", capsule, f"{tmp_path / 'port.py'}:Port.block", "--gates", "1"]) == 0
