"""What a program says, and its exit status, where there is no memory, no device, or nobody who takes its output."""

import asyncio
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jax_tformer.config.errors import InputError
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.runs import preparing, restoring, startup
from jax_tformer.runs.progress import ProgressLine
from jax_tformer.terminal import Interruption, run_program
from jax_tformer.training import sharding

ROOT = Path(__file__).parents[1]


def outcome(program: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str]:
    """The exit status, and what stands on standard error."""
    with pytest.raises(SystemExit) as stop:
        run_program(program, "program.py", smaller="make it smaller")
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("Unable to allocate 29.1 TiB for an array with shape (4, 1)"), "memory: 29.1 TiB more"),
        (MemoryError(), "there is not enough memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 109951162777600 bytes."), "memory: 102,400.0 GiB"),
        (RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 1.50GiB (1610612736B)"), "memory: 1.50 GiB"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."),
            "4.0 GiB",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), "20.00 GiB more could not be allocated"),
        (OverflowError("int too large to convert"), "a size is larger than any computer has room for"),
    ],
    ids=["numpy", "python", "XLA", "XLA on a GPU", "torch", "torch on a GPU", "overflow"],
)
def test_memory_that_cannot_be_had(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def program(arguments: object) -> int:
        raise error

    status, line = outcome(program, capsys)
    assert status == 2
    assert line.startswith("program.py: error: ")
    assert said in line
    assert line.endswith("; make it smaller\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("a fault"), ValueError("a fault")])
def test_a_fault_of_the_program_keeps_its_traceback(error: Exception) -> None:
    def program(arguments: object) -> int:
        raise error

    with pytest.raises(type(error), match="a fault"):
        run_program(program, "program.py")


def test_real_memory_that_cannot_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    def program(arguments: object) -> int:
        return int(jax.numpy.zeros((2**20, 2**26))[0, 0])

    status, line = outcome(program, capsys)
    assert (status, line.count("\n")) == (2, 1)
    assert "262,144.0 GiB more could not be allocated" in line


def test_a_state_that_no_memory_holds_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_tformer.config.experiment import MeshConfig
    from jax_tformer.training.sharding import make_mesh

    mesh = make_mesh(MeshConfig(), 1)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = {"w": jax.ShapeDtypeStruct((2**20, 2**10), "float32", sharding=whole)}
    monkeypatch.setattr(sharding, "host_memory", lambda: 4 * 2**30)
    preparing.require_room(state, mesh)
    monkeypatch.setattr(sharding, "host_memory", lambda: 4 * 2**30 - 1)
    with pytest.raises(InputError, match=r"take 4\.0 GiB, and there are 4\.0 GiB here; make the model smaller"):
        preparing.require_room(state, mesh)


def test_the_memory_of_the_machine_is_known() -> None:
    assert 2**28 < sharding.host_memory() < 2**50


@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'cuda': none\nhere"), AssertionError()], ids=["told", "silent"]
)
def test_a_platform_that_is_not_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[object]:
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(InputError, match=r"there is no such device here.*set JAX_PLATFORMS=cpu or unset it") as caught:
        startup.set_up_jax(EXPERIMENTS["dates"].config.model)
    assert "\n" not in str(caught.value)


def test_a_platform_that_jax_has_never_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What JAX says of "gpu" is about another name, rocm, in nested brackets."""

    def devices() -> list[object]:
        unknown = "Backend 'rocm' is not in the list of known backends: ['cpu', 'tpu']."
        raise RuntimeError(f"Unable to initialize backend 'rocm': {unknown} (set JAX_PLATFORMS='' to choose)")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "gpu")
    with pytest.raises(InputError, match=r"^JAX_PLATFORMS is 'gpu', and there is no such device here; set"):
        startup.set_up_jax(EXPERIMENTS["dates"].config.model)


PROGRAM = """
import sys
import warnings
from jax_tformer.terminal import run_program
def program(arguments):
    print("an answer", flush=arguments == ["at once"])
    return 0
run_program(program, "program.py")
"""


@pytest.mark.parametrize("when", ["at once", "at the end"])
@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        ("> /dev/full", 2, "program.py: error: standard output: No space left on device\n"),
        (">&-", 2, "program.py: error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        ("2>&- >&-", 2, ""),
        ("> /dev/full 2> /dev/full", 2, ""),
        ("2>&- | sleep 0", 141, ""),
        ("| true", 141, ""),
        ("> /dev/null", 0, ""),
    ],
    ids=["full", "closed", "both closed", "both full", "no errors", "gone", "well"],
)
def test_output_that_nobody_takes(output: str, status: int, said: str, when: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # A reader that has gone before anything is written.
    program.write_text(PROGRAM.replace("import sys", "import sys, time; time.sleep(0.2)") if "|" in output else PROGRAM)
    command, _, reader = output.partition("|")
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'"{sys.executable}" program.py "{when}" {command} {f"| {reader}" if reader else ""}; '
            "exit ${PIPESTATUS[0]}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (status, said, "")


def test_every_character_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))

    def program(arguments: object) -> int:
        print("\N{BOX DRAWINGS HEAVY HORIZONTAL} \udc80")
        return 0

    with pytest.raises(SystemExit) as stop:
        run_program(program, "program.py")
    assert (stop.value.code, printed.getvalue().decode()) == (0, "\N{BOX DRAWINGS HEAVY HORIZONTAL} \\udc80\n")


def test_a_failed_save_prints_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorStore's threads report it to an event loop that Orbax has closed; nothing can catch what that raises."""

    class Late:
        def __init__(self, report: Callable[[], object]) -> None:
            self.report = report

        def __del__(self) -> None:
            self.report()

    loop = asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    restoring.orbax.cache_clear()
    restoring.orbax()
    Late(lambda: loop.call_soon_threadsafe(print))
    assert capsys.readouterr().err == ""
    Late(lambda: 1 / 0)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_run_whose_lines_reach_nobody_is_asked_to_save_and_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("/dev/full", "a pipe"):
        read, write = os.pipe()
        os.close(read)
        output = open(place, "w") if place == "/dev/full" else os.fdopen(write, "w")  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", output)
        with Interruption() as stop, ProgressLine(0, 2, stop.unheard) as line:
            line.say("hello")
            assert stop.status == 141
            line.update(1, 2.0, None)
            line.say("hello again")
        monkeypatch.undo()


DAMAGED_CACHE = """
import sys
import warnings
from pathlib import Path
import jax
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.runs.startup import set_up_jax

set_up_jax(EXPERIMENTS["dates"].config.model)
folder = Path(sys.argv[1]) / "jax-tformer"

def compile_anew():
    jax.clear_caches()
    for name in ("first", "second"):
        def f(x):
            return x + 1
        f.__name__ = name
        assert jax.jit(f)(1) == 2
    return {path.name: path.read_bytes() for path in folder.glob("*-cache")}

whole = compile_anew()
assert {name.split("-")[0] for name in whole} >= {"jit_first", "jit_second"}
for name in whole:
    (folder / name).write_bytes(whole[name][:20])
again = compile_anew()
assert again.keys() == whole.keys() and all(len(again[name]) > 20 for name in again)
print("mended", file=sys.stderr)
assert compile_anew() == again
"""


def test_damaged_compiled_programs_are_replaced_with_one_line(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED_CACHE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "compiled programs in the cache were damaged; they are compiled anew\nmended\n"


@pytest.mark.parametrize("damaged", [True, False])
def test_a_cache_that_cannot_be_had_is_not_called_damaged(
    damaged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if damaged:
        (tmp_path / "jit_step-0-cache").touch()
    show = startup._CacheWarnings(tmp_path)
    show("Error reading persistent compilation cache entry for 'jit_step': OSError: here", UserWarning, "file", 1)
    said = (
        "in the cache were damaged; they are compiled anew"
        if damaged
        else f"cannot be kept in {tmp_path}: OSError: here"
    )
    assert capsys.readouterr().err == f"compiled programs {said}\n"


def test_other_warnings_are_shown_as_before(tmp_path: Path) -> None:
    shown: list[str] = []
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where, **more: shown.append(str(message))
        show = startup._CacheWarnings(tmp_path)
        show("Error writing persistent compilation cache entry for 'jit_step': OSError: full", UserWarning, "file", 1)
        show("something else", UserWarning, "file", 1)
    assert shown == ["something else"]
