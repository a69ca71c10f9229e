"""The processes that train one model together: who speaks, who writes, and what all have agreed on.

This is the only file that asks JAX how many there are. All run the same program and call these functions in the same
order, as they do for every step; one process is the special case in which nothing is waited for. The engine is JAX's
own (`jax.distributed`): it finds the processes, moves arrays between them, and ends all if one dies.
"""

import atexit
import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jax_tformer.config.errors import WHY, InputError, explained, require
from jax_tformer.config.experiment import DistributedConfig
from jax_tformer.files import changed_fields, shortened
from jax_tformer.terminal import ENDINGS, one_line

if TYPE_CHECKING:
    # Imported at first use, so that a program which is alone refuses bad input before it imports JAX.
    import jax
    from jax.sharding import Mesh

T = TypeVar("T")
_OCCASIONS = itertools.count()
"""Numbers what is said; all processes come to the same number, because they call the same functions."""
_PATIENCE = 7 * 24 * 3600 * 1000
"""Milliseconds to wait for what another process says: no less than it may take. If it dies, JAX ends this one."""

_LAUNCHERS = {
    "slurm": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    "ompi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri"),
    "mpi": ("PMI_SIZE", "PMI_RANK", ""),
}
"""Name -> the variables in which a launcher says how many processes it started and which one this is, and the one from
which JAX knows where they meet: that of a step of Slurm, and of Open MPI up to version 4."""
_ENDED = "jax_tformer/ended"
"""What the first process to end before its time says of itself."""
_ALONE = threading.Event()
"""Set while the others wait for what the first process does."""
_ENDING = threading.Event()
"""Set when this process has come to its end."""
_GRACE = 2
"""Seconds in which processes that end for the same reason come to their ends."""
_ABORTS = re.compile(r"coordination_service|client\.h:\d+\]")
"""In the first line of what JAX says when it ends a process."""
_CHATTER = re.compile(r"\[Gloo\]|peer ranks|^\d*$")
"""In lines that say that all is well. Threads write them at once, so that one may be torn in two."""
_LOST = re.compile("[Gg]loo|NCCL|[Cc]onnection closed|UNAVAILABLE")
"""In the message of a collective operation that has lost a process."""
_HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, and all others end."""
_SHUTDOWN = 20
"""Seconds that a process which has failed waits for the others at its end. They then end too."""


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[None]:
    """Runs the block in all processes that `join` finds, and ends when all have run it.

    Where another process dies, arrays stop arriving: then JAX ends this one too, once it knows which.
    """
    join(config)
    try:
        yield
    except (RuntimeError, ValueError) as error:  # JAX raises either
        if count() > 1 and _LOST.search(str(error)) and not isinstance(error, InputError):
            time.sleep(2 * _HEARTBEAT)
        raise
    wait_for_all()


def join(config: DistributedConfig) -> None:
    """Joins the processes that `config` or a launcher describes; does nothing if there is one.

    JAX finds the processes of Slurm, of Open MPI 4, of a TPU pod and, with its extra `k8s`, of Kubernetes. For others
    `config` names the coordinator; what it leaves out, their number and that of this one, comes from the launcher's
    variables. Call it before JAX is asked for a device. Afterwards only the first process writes to standard output.
    Raises InputError if something is missing, if the port is in use, or if the others do not come in time.
    """
    launcher, count, number = _find_launcher()
    given: dict[str, Any] = {"cluster_detection_method": launcher}
    if config.coordinator is not None:
        number = _whole("JOB_COMPLETION_INDEX") if number is None else number
        missing = [] if config.processes or count > 1 else ["--distributed.processes"]
        missing += ["--distributed.process"] if number is None and config.process is None else []
        count = config.processes or count
        number = number if config.process is None else config.process
        if missing:
            flags = " and ".join(missing)
            raise InputError(f"--distributed.coordinator is given and {flags} not; no launcher tells it either")
        if number == 0:
            _require_free(config.coordinator)
        given = {"coordinator_address": config.coordinator, "num_processes": count, "process_id": number}
        given["cluster_detection_method"] = launcher or "deactivate"
    elif count > 1 and launcher is None:
        raise InputError(
            f"{count} processes were started, and nothing says where they meet; expected --distributed.coordinator "
            "HOST:PORT, the address of the first one and any free port, the same for all"
        )
    elif count == 1 and not _on_cloud_tpu() and not _in_kubernetes():
        return
    # Before JAX, because a program with threads must not fork.
    _shorten_last_words()
    import jax

    # It would take SIGTERM for itself; here a signal to one process is told to all (`Signals`).
    jax.config.update("jax_enable_preemption_service", False)
    where = "" if config.coordinator is None else f" to {config.coordinator}"
    reach = where and ", with the address of the first one, which others must reach"
    told = f"the other processes did not come within {config.timeout} s{where}; start all of them{reach}"
    with _limited(config.timeout, told):
        jax.distributed.initialize(
            **given,
            initialization_timeout=config.timeout + _SHUTDOWN,
            heartbeat_timeout_seconds=_HEARTBEAT,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    watch = threading.Thread(target=_end_with_others, daemon=True)
    watch.start()
    # A thread that waits in C++ when Python ends would abort the process.
    atexit.register(watch.join)
    atexit.register(_ENDING.set)
    ENDINGS.append(_tell_others)


def require_alone(program: str, config: DistributedConfig | None = None) -> None:
    """Raises InputError if a launcher or `config` describes several processes of a `program` that cannot use them."""
    require(
        config is None or config.coordinator is None,
        f"{program} runs in one process; leave --distributed out, and start one",
    )
    _, count, _ = _find_launcher()
    require(
        count <= 1,
        f"{count} processes were started, and {program} runs in one; start one, as with srun --ntasks=1 or "
        "mpirun -n 1; it can use all devices of its machine",
    )


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return _number() == 0


def count() -> int:
    """How many processes work together; inside of what `ask_first` runs, one."""
    return 1 if _engine() is None or _ALONE.is_set() else int(_engine().num_processes)


def active() -> set[int] | None:
    """The numbers of the processes that work while the others wait, as Orbax wants to know; None: nobody waits."""
    return {_number()} if _ALONE.is_set() else None


def _number() -> int:
    return 0 if _engine() is None else int(_engine().process_id)


def _engine() -> Any:
    """JAX's state of the processes that have joined; None as long as this one is alone. Does not ask for devices."""
    module = sys.modules.get("jax._src.distributed")
    return None if module is None or module.global_state.client is None else module.global_state


def ask_first(work: Callable[[], T]) -> T:
    """Returns, to all processes, what `work` returns on the first, as JSON; fails for all where it fails there.

    `work` runs as if its process were the only one, with the devices of that one. Raises what `work` raises on the
    first process, and InputError on the others.
    """
    if count() == 1:
        return work()
    answer = failure = None
    name = f"jax_tformer/{next(_OCCASIONS)}"
    if is_first():
        _ALONE.set()
        try:
            answer = work()
        except Exception as error:
            failure = error
        finally:
            _ALONE.clear()
        _say(name, {"answer": answer, "failure": None if failure is None else str(failure)})
    said = _hear(name, 0)
    if failure is not None:
        raise failure
    require(said["failure"] is None, f"the first process stopped: {said['failure']}")
    return said["answer"]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What one process refuses in this block, all refuse at its end: nobody waits for one that has gone.

    The block must not wait for other processes. Raises InputError where another process has raised anything.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    refusals = _exchange(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for number, told in enumerate(refusals):
        require(told is None, f"process {number} of {count()} stopped: {told}")


def first_then_others(work: Callable[[], T]) -> T:
    """Runs `work` on the first process, then on all others: what it leaves in a shared cache is made only once.

    `work` must not wait for other processes. Raises InputError where another process has raised anything.
    """
    with together():
        made = [work()] if is_first() else []
    with together():
        return made[0] if made else work()


def require_same(said: Mapping[str, Any]) -> None:
    """Raises InputError, naming the process and what differs, unless all processes say the same, which is JSON."""
    first, *others = _exchange(dict(said))
    for number, other in enumerate(others, 1):
        changed = changed_fields(first, other)
        differing = [f"{name} {theirs!r} (the first: {ours!r})" for name, (ours, theirs) in changed.items()]
        require(not differing, f"process {number} of {count()} has {shortened(differing)}; start all with the same")


def wait_for_all() -> None:
    """Returns when all processes have called it, however long that takes."""
    _exchange(None)


def least(value: int | None) -> int | None:
    """Returns the least number that any process has; None if none has one."""
    return min((number for number in _exchange(value) if number is not None), default=None)


def require_device_each(devices: "list[jax.Device]", what: str) -> None:
    """Raises InputError if a process has none of `devices`, those of `what`."""
    if count() == 1:
        return
    idle = sorted(set(range(count())) - {device.process_index for device in devices})
    require(
        not idle,
        f"{what}, which leaves process {shortened(list(map(str, idle)))} of {count()} without a device; expected "
        "one of each at least: choose a batch size or a mesh that uses all devices, or start fewer processes",
    )


class Signals:
    """Tells every process of a signal that any one got, without waiting for a step.

    All processes ask once per step. An answer counts what was known when the previous step was dispatched, so that all
    get the same one.
    """

    def __init__(self, mesh: "Mesh") -> None:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(lambda numbers: numbers.max())
        self._asked = None

    def __call__(self, number: int | None) -> int | None:
        """Returns the number of a signal that all processes know of; `number` is of what this one has got, if any."""
        if count() == 1:
            return number
        import jax

        asked = self._asked
        size = self._sharding.mesh.size
        mine = np.array([number or 0], np.int32)
        self._asked = self._largest(jax.make_array_from_callback((size,), self._sharding, lambda _: mine))
        return None if asked is None else int(asked) or None


def _exchange(said: Any) -> list[Any]:
    """Returns what each process says, which is JSON, in the order of their numbers; waits for all."""
    if count() == 1:
        return [said]
    name = f"jax_tformer/{next(_OCCASIONS)}"
    _say(name, said)
    return [_hear(name, number) for number in range(count())]


def _say(name: str, said: Any) -> None:
    """Leaves `said` with the coordinator, where it waits for those who ask: they need not come at the same time.

    Collective operations do need that: those of CPUs fail if processes come half a minute apart.
    """
    _engine().client.key_value_set(f"{name}/{_number()}", json.dumps(said, default=str))


def _hear(name: str, number: int) -> Any:
    return json.loads(_engine().client.blocking_key_value_get(f"{name}/{number}", _PATIENCE))


def _find_launcher() -> tuple[str | None, int, int | None]:
    """Returns (its name, if JAX knows it, how many processes it started, which one this is): of the one that started
    most, for each can run inside another."""
    found: tuple[str | None, int, int | None] = (None, 1, None)
    for name, (size, rank, meeting) in _LAUNCHERS.items():
        # A batch script of Slurm, which is one process, knows the number of tasks too, but has no step.
        started = 0 if name == "slurm" and meeting not in os.environ else _whole(size) or 0
        if started > found[1]:
            found = (name if meeting in os.environ else None, started, _whole(rank))
    return found


def _whole(variable: str) -> int | None:
    told = os.environ.get(variable, "")
    return int(told) if told.isdecimal() else None


def _on_cloud_tpu() -> bool:
    """Whether this is a machine with TPUs, which may be one of a pod: there JAX asks the machine itself."""
    chips = glob("/dev/accel*") + glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def _in_kubernetes() -> bool:
    """Whether this is a pod of an indexed job, whose others JAX can find."""
    inside = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return inside and importlib.util.find_spec("kubernetes") is not None


def _require_free(coordinator: str) -> None:
    port = coordinator.rpartition(":")[2]
    with socket.socket(socket.AF_INET6) as probe, contextlib.suppress(OverflowError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with explained(
            f"port {port} of this machine cannot be opened ({WHY}); choose another "
            "--distributed.coordinator HOST:PORT for all processes"
        ):
            probe.bind(("::", int(port)))


@contextlib.contextmanager
def _limited(seconds: int, told: str) -> Iterator[None]:
    """Ends the program with `told` and status 2 if the block takes longer: JAX would abort, with a trace of C++."""

    def end() -> None:
        print(f"error: {told}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell_others(status: int, message: str | None) -> None:
    """At the end of this process, tells the others of it; if they have not come to theirs, leaves without them."""
    _ENDING.set()
    if status == 0:
        return
    with contextlib.suppress(Exception):  # another process was the first to say it
        _engine().client.key_value_set(
            _ENDED, json.dumps([_number(), status, (message or f"status {status}").removeprefix("error: ")])
        )
    with contextlib.suppress(Exception):
        _engine().client.wait_at_barrier(f"{_ENDED}/all", 1000 * 2 * _GRACE)
        return
    os._exit(status)


def _end_with_others() -> None:
    """In a thread: ends this process when another one has ended by itself, for which it would wait in vain."""
    said = None
    while said is None:
        if _ENDING.wait(_GRACE / 4):
            return
        with contextlib.suppress(Exception):  # nobody has said anything yet
            said = _engine().client.key_value_try_get(_ENDED)
    # The first one last, because JAX ends all others when it has gone.
    if not _ENDING.wait(_GRACE * (3 if is_first() else 1)):
        number, status, message = json.loads(said)
        print(f"error: process {number} of {count()} ended: {one_line(message)}", file=sys.stderr, flush=True)
        os._exit(status)


def _shorten_last_words() -> None:
    """Passes standard error through a child, which says in one line what JAX says as it ends this process.

    JAX aborts where another process has died, with a trace of C++ that Python cannot catch. What its libraries print to
    standard output, which is for results, goes the same way.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        kept = os.dup(1)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.stdout = os.fdopen(kept, "w", encoding="utf-8", errors="backslashreplace")
        return
    os.close(writer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(reader, encoding="utf-8", errors="replace") as lines, contextlib.suppress(OSError):
        for line in lines:
            if _ABORTS.search(line):
                dead = re.search(r"heartbeats\):\s(\d+)", rest := line + lines.read())
                who = f"process {dead[1]} has died or hangs" if dead else "the first process has ended"
                if "Shutdown barrier" not in rest or dead:
                    print(f"error: {who}; the same command continues the run", file=sys.stderr, flush=True)
            elif not _CHATTER.search(line):
                print(line, end="", file=sys.stderr, flush=True)
    os._exit(0)
