"""Checkpoints in processes of their own: many devices, two processes, a full disk."""

import pytest

from tests.several_processes import finish, free_port, start

EIGHT_DEVICES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_tformer.runs.checkpoints import Checkpoints
assert not any(name.startswith("orbax") for name in sys.modules), "orbax must be imported at first use only"

jax.config.update("jax_enable_x64", True)
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
    assert finish([start(["-c", EIGHT_DEVICES, tmp_path], 8)], 60) == [(0, "", "")]


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
    [(_, output, errors)] = finish([start(["-c", FULL_DISK, tmp_path], 1)], 60)
    message, steps = output.splitlines()
    assert "the checkpoint of step 2 could not be written" in message
    assert (steps, errors) == ("[1]", "")


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
    write_checksums = module.write_checksums
    module.write_checksums = lambda folder: (time.sleep(0.3), write_checksums(folder))
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
    port = free_port()
    for status, output, errors in finish([start(["-c", TWO_PROCESSES, tmp_path, port, n], 1) for n in range(2)], 60):
        assert status == 0, errors
        assert output.endswith("refused\n")
