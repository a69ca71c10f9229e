"""What the profiler watches, in a process of its own: a model that trains on one batch, or one that decodes."""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.profile.instructions import instructions
from benchmarks.profile.recording import BEGIN, recorded_seconds
from benchmarks.sides.ours import arranged
from benchmarks.training_cases import OPTIMIZER, TRAINING, BatchShape, draw_batch
from jax_tformer.config import TransformerConfig
from jax_tformer.decoding.generation import Prompts, require_speaker
from jax_tformer.decoding.loop import State, advance, row_keys, start
from jax_tformer.decoding.settings import DecodingConfig
from jax_tformer.decoding.strategies import rules_of
from jax_tformer.model.functional import transformer
from jax_tformer.run.startup import compiler_options
from jax_tformer.training.optimizer import optimizer
from jax_tformer.training.step import init_state, train_step

_UNKNOWN = {"group": "other", "source": "", "shape": ""}


class Traced(ABC):
    """Steps of a compiled program."""

    def __init__(self, program: jax.stages.Compiled) -> None:
        self._program, self.instructions = program, instructions(program.as_text() or "")

    @abstractmethod
    def prepare(self) -> None:
        """What must come before the steps and is no part of them."""

    @abstractmethod
    def advance(self, count: int) -> list[float]:
        """`count` steps; seconds of each, or of one on average."""

    def steps(self, count: int) -> list[float]:
        """Seconds of a step, without the profiler."""
        self.prepare()
        return self.advance(count)

    def profile(self, count: int) -> dict[str, Any]:
        """`count` steps under the profiler: their seconds, and those of every instruction a step."""
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                # The first one waits for the profiler.
                self.steps(1)
                self.prepare()
                with jax.profiler.TraceAnnotation(BEGIN):
                    seconds = self.advance(count)
            recorded = recorded_seconds(Path(folder))
        found = []
        for name, taken in sorted(recorded.items(), key=itemgetter(1), reverse=True):
            known = self.instructions.get(name)
            described = {"group": known.group(), "source": known.source(), "shape": known.shape} if known else _UNKNOWN
            found.append({"name": name, **described, "seconds": taken / count})
        return {"step_seconds": seconds, "instructions": found}


class Training(Traced):
    """The step of train.py."""

    def __init__(self, config: TransformerConfig, shape: BatchShape, device: str) -> None:
        net, tx = transformer(config), optimizer(OPTIMIZER, TRAINING.steps)
        with jax.default_device(jax.local_devices(backend=device)[0]):
            self._state = jax.jit(lambda key: init_state(net, tx, key))(jax.random.key(0))
            self._batch = {name: jnp.array(ids) for name, ids in draw_batch(config, shape).items()}
            step = jax.jit(train_step(net, tx), donate_argnums=0, compiler_options=compiler_options())
            super().__init__(step.lower(self._state, self._batch).compile())

    def prepare(self) -> None:
        """Nothing."""

    def advance(self, count: int) -> list[float]:
        """Updates, each waited for."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._state, _ = jax.block_until_ready(self._program(self._state, self._batch))
            seconds.append(time.perf_counter() - began)
        return seconds


class Decoding(Traced):
    """The loop of `generate`, greedy, after prompts of one length."""

    def __init__(self, config: TransformerConfig, prompts: Sequence[Sequence[int]], new_tokens: int, device: str):
        net, self._device = require_speaker(transformer(config)), jax.local_devices(backend=device)[0]
        self._net, self._params = net, arranged(net, self._device)
        asked = Prompts(prompts, np.full(len(prompts), new_tokens, np.int32), None, (-1,), None)
        with jax.default_device(self._device):
            (self._arrays, self._slots), self._ends = asked.arrays(net), jnp.array([-1], jnp.int32)
            self._rules = rules_of(DecodingConfig(max_new_tokens=new_tokens))
            self.prepare()
            self._leaves, tree = jax.tree.flatten(self._params)

            def loop(leaves: list[jax.Array], state: State, steps: int) -> tuple[State, jax.Array]:
                return advance(
                    net, self._rules, jax.tree.unflatten(tree, leaves), state, self._ends, steps, self._slots
                )

            super().__init__(jax.jit(loop, donate_argnums=1).lower(self._leaves, self._state, 1).compile())

    def prepare(self) -> None:
        """Reads the prompts and chooses the first tokens."""
        with jax.default_device(self._device):
            keys = row_keys(jax.random.key(0), np.arange(len(self._arrays[0]), dtype=np.uint32), 1)
            state = start(self._net, self._rules, self._params, *self._arrays, self._ends, keys, slots=self._slots)
        self._state = jax.block_until_ready(state)

    def advance(self, count: int) -> list[float]:
        """So many tokens of every row in one call; seconds of one on average."""
        with jax.default_device(self._device):
            began = time.perf_counter()
            self._state, _ = jax.block_until_ready(self._program(self._leaves, self._state, count))
            return [(time.perf_counter() - began) / count]
