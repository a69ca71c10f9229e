"""Starts programs as processes that see devices of their own, and trainings of several of them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from jax_tformer.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SMALL = (
    "python-docs --steps 6 --training.batch-size 8 --training.log-every 1 --training.evaluate-every 3 "
    "--training.evaluate-batches 2 --data.tokenizer.kind bytes --data.tokenizer.vocab-size None --model.d-model 32 "
    "--data.context-length 16 --model.compute.dtype float64 --model.compute.parameter-dtype float64 --mesh.fsdp 4"
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def start(program, devices, **more):
    """Starts one process of a program, which sees `devices` devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, program)], env=environment, **pipes, **more)


def finish(children, seconds=500):
    """Waits for all; returns the status, output and errors of each."""
    told = [child.communicate(timeout=seconds) for child in children]
    return [(child.returncode, *texts) for child, texts in zip(children, told, strict=True)]


def wait_for_rows(run, count, children):
    """Waits until a run's log has so many rows."""
    deadline = time.monotonic() + 120
    while len(read_metrics(run / "metrics.jsonl")) < count:
        alive = time.monotonic() < deadline and all(child.poll() is None for child in children)
        assert alive, f"no step was made: {finish(children, 5)}"
        time.sleep(0.05)


def run_alone(program, devices=1, **more):
    """Runs one process of a program to its end, which must be a good one; returns its output and errors."""
    ((status, *told),) = finish([start(program, devices, **more)])
    assert status == 0, told
    return told


def together(count, devices, program, limits=None):
    """Starts `count` processes that see so many devices each, the last one within `limits`.

    `program` gives the arguments of one, told where they meet: the fields of DistributedConfig, none if it is alone.
    """
    port = free_port()

    def where(number):
        meeting = {"coordinator": f"localhost:{port}", "processes": count, "process": number, "timeout": 60}
        return meeting if count > 1 else {}

    limited = [None] * (count - 1) + [limits]
    return [start(program(where(number)), devices, preexec_fn=limited[number]) for number in range(count)]


def flags(where):
    """Says to a program where its processes meet."""
    return [f"--distributed.{name}={value}" for name, value in where.items()]


def train(run, count, devices, more="", limits=None):
    """Starts train.py in `count` processes, in the folder `run`."""
    command = [ROOT / "train.py", *SMALL.split(), *more.split(), "--run", run]
    return together(count, devices, lambda where: [*command, *flags(where)], limits)
