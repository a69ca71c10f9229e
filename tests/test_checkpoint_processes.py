"""Checkpoints in processes of their own: many devices, two processes, a full disk, kill -9."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_tformer.runs.checkpoints import Checkpoints, find_damage
from tests.checkpoint_states import save_all

ROOT = Path(__file__).parents[1]


def run_python(code, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_ENABLE_X64": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


EIGHT_DEVICES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_tformer.runs.checkpoints import Checkpoints
assert not any(name.startswith("orbax") for name in sys.modules), "orbax must be imported at first use only"

axes = (jax.sharding.AxisType.Auto,) * 2
wide = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=axes)
tall = jax.make_mesh((8, 1), ("fsdp", "tensor"), axis_types=axes)
values = np.random.default_rng(0).standard_normal((16, 24))
assert values.dtype == np.float64

def arrays(mesh, spec):
    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))
    return {"params": {"w": put(values, spec), "all": put(values[0], P())}, "step": jnp.int32(5)}

state = arrays(wide, P("fsdp", "tensor"))
checkpoints = Checkpoints(Path(sys.argv[1]), 2)
checkpoints.save(5, state, {})
checkpoints.wait()
for target in (state, arrays(tall, P("fsdp")), arrays(wide, P(None, "tensor")), None):
    if target is None:
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    else:
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
    restored = checkpoints.restore(wanted)
    w = restored.state["params"]["w"]
    assert w.dtype == np.float64 and np.asarray(w).tobytes() == values.tobytes()
    assert np.asarray(restored.state["params"]["all"]).tobytes() == values[0].tobytes()
    if target is None:
        assert w.devices() == {jax.devices()[0]}
    else:
        assert w.sharding == target["params"]["w"].sharding and len(w.devices()) == 8
checkpoints.close()
"""


def test_shards_move_between_meshes_in_silence(tmp_path):
    child = run_python(
        EIGHT_DEVICES, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_ENABLE_X64="1"
    )
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert (output, errors) == ("", "")


FULL_DISK = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from jax_tformer.config.errors import InputError
from jax_tformer.runs.checkpoints import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), 2)
checkpoints.save(1, {"params": {"w": jnp.zeros(1000)}}, {})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoints.save(2, {"params": {"w": jnp.zeros(100_000)}}, {})
try:
    checkpoints.wait()
except InputError as error:
    print(error)
print(checkpoints.steps())
"""


def test_a_full_disk_is_one_line(tmp_path):
    output, errors = run_python(FULL_DISK, tmp_path).communicate(timeout=60)
    message, steps = output.splitlines()
    assert "the checkpoint of step 2 could not be written" in message
    assert steps == "[1]"
    assert errors == ""


SAVE_UNTIL_KILLED = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax_tformer.runs.checkpoints import Checkpoints

def make(step):
    tree = {"w": jnp.full((300, 100), step), "b": jnp.full(9, step)}
    return {"params": tree, "opt_state": {"mean": tree}}

checkpoints = Checkpoints(Path(sys.argv[1]), 2)
restored = checkpoints.restore(jax.eval_shape(lambda: make(0)))
step = 0 if restored is None else restored.step
assert restored is None or all((leaf == step).all() for leaf in jax.tree.leaves(restored.state))
print("from", step, *(restored.skipped if restored else ()), flush=True)
while True:
    step += 1
    checkpoints.save(step, make(step), {"step": step, "val_loss": 0.0 if step % 5 else -float(step)})
    print("begun", step, flush=True)
    if step % 3 == 0:
        checkpoints.wait()
        print("done", step, flush=True)
"""


@pytest.mark.deep
def test_kill_at_any_moment_leaves_the_newest_finished_step_and_the_best(tmp_path):
    done = 0
    for await_line in ("done", "begun", "begun", "done"):
        delay = random.uniform(0, 0.4)
        child = run_python(SAVE_UNTIL_KILLED, tmp_path)
        assert child.stdout is not None
        start = child.stdout.readline()
        assert start.startswith("from"), child.communicate()[1]
        assert int(start.split()[1]) >= done
        assert "skipped" not in start
        lines = [start]
        while not lines[-1].startswith(await_line):
            lines.append(child.stdout.readline())
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        lines += child.communicate(timeout=60)[0].splitlines()
        done = max([done, *(int(line.split()[1]) for line in lines if line.startswith("done"))])
        steps = Checkpoints(tmp_path, 2).steps()
        # Two that are kept, the best, and one that was not deleted yet.
        assert len(steps) <= 4
        assert not steps or steps[-1] >= done
        assert done < 5 or Checkpoints(tmp_path, 2).best_loss() <= -(done - done % 5)
        assert all(find_damage(tmp_path / str(step)) is None for step in steps), f"{await_line} + {delay} s"
    assert done > 0
    save_all(tmp_path, done + 1000, keep=2)
    assert all(path.name.isdigit() for path in tmp_path.iterdir())


TWO_PROCESSES = """
import sys, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
folder, port, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize("localhost:" + port, 2, index, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20)
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_tformer.config.errors import InputError
from jax_tformer.runs import checkpoints as module
from jax_tformer.runs.checkpoints import Checkpoints

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
make = jax.jit(lambda step: {"params": {"w": jnp.arange(64.0) + step}}, out_shardings=NamedSharding(mesh, P("data")))
if index == 0:
    seal = module.seal
    module.seal = lambda folder: (time.sleep(0.3), seal(folder))
checkpoints = Checkpoints(folder, 2)
for step in (1, 2, 2, 3):
    checkpoints.save(step, make(step), {"step": step})
checkpoints.wait()
assert checkpoints.steps() == [2, 3]

wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make(0))
def check(step):
    restored = checkpoints.restore(wanted)
    assert restored.step == step and restored.extra == {"step": step}
    for shard in restored.state["params"]["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(64.0)[shard.index] + step)

check(3)
def damage(step):
    sync_global_devices("the other process may still be reading")
    if index == 0:
        (folder / str(step) / "extra.json").write_text("{}")
damage(3)
check(2)
damage(2)
try:
    checkpoints.restore(wanted)
except InputError:
    print("refused")
checkpoints.close()
"""


@pytest.mark.deep
def test_two_processes_share_checkpoints(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = [run_python(TWO_PROCESSES, tmp_path, port, index) for index in range(2)]
    for child in children:
        output, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
        assert output.endswith("refused\n")
