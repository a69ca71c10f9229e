"""The example of a port: its workflow does what its files need, and its test is green."""

import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import yaml

import parity
from parity.gates.torch_side import tensors_of
from parity.gates.weight_map import Weights
from parity_tests.test_plugin import run_pytest
from parity_tests.test_readme import run
from tests.several_processes import ROOT

EXAMPLE = ROOT / "examples" / "port"


def steps(workflow):
    [job] = yaml.safe_load(workflow.read_text())["jobs"].values()
    return job["steps"]


def test_the_workflow_runs_the_test_and_keeps_its_report(tmp_path):
    here = steps(EXAMPLE / ".github" / "workflows" / "parity.yml")
    commands = {step["name"]: step["run"] for step in here if "run" in step}
    assert commands["install"] == "pip install '.[test]'"
    program, *arguments = shlex.split(commands["parity"])
    assert program == "pytest"
    project = tmp_path / "port"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__", "parity-report"))
    done = run_pytest(project, *arguments, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GREEN: 5 figures" in done.stdout
    assert (tmp_path / "summary.md").read_text().startswith("## Parity: GREEN\n")
    [upload] = [step["with"] for step in here if "upload-artifact" in step.get("uses", "")]
    assert json.loads((project / upload["path"] / "parity.json").read_text())["verdict"] == "green"


def test_the_documents_say_how_to_use_two_machines(own_folder, monkeypatch):
    """Their two lines, on the example's sides."""
    monkeypatch.syspath_prepend(EXAMPLE)
    port, reference = import_module("port"), import_module("reference")
    module, x = reference.Block(), np.random.default_rng(0).standard_normal((8, 16))
    tensors = tensors_of(module)[0]
    names = {"block": port.block, "Block": reference.Block, "WEIGHTS": port.WEIGHTS, "x": x, "parity": parity}
    names["params"] = Weights(port.WEIGHTS, tensors).into(tensors)
    section = (ROOT / "docs" / "parity-howto.md").read_text().partition("## On two machines")[2]
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        run(code, "docs/parity-howto.md", names)
    assert Path("block.capsule/capsule.json").exists()


def test_actions_are_those_of_our_own_workflow():
    """Pinned, and moved together."""
    ours = {step["uses"] for step in steps(ROOT / ".github" / "workflows" / "parity.yml") if "uses" in step}
    theirs = {step["uses"] for step in steps(EXAMPLE / ".github" / "workflows" / "parity.yml") if "uses" in step}
    assert theirs == ours
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in theirs)


def test_a_test_of_a_port_is_five_lines():
    """Besides NumPy's import. The documents show the same test."""
    text = (EXAMPLE / "test_port.py").read_text()
    assert len([line for line in text.splitlines() if line and line != "import numpy"]) == 5
    assert text[text.index("def test_block") :] in (ROOT / "docs" / "parity-howto.md").read_text()
