"""How fast batches come, and how many times as fast as a step takes them: `python -m benchmarks.input_pipeline`."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.session import Report, Session, by_turns, make_table, other_work, run_benchmark, spread
from benchmarks.training_cases import small_gpt, tiny, without_dropout
from jax_tformer.experiment import ExperimentConfig, PairData
from jax_tformer.presets import EXPERIMENTS
from jax_tformer.run.startup import compiler_options
from jax_tformer_comparison.machine import Neighbours

BAR = 20.0
"""The input must be at least this many times as fast as the step that it feeds."""
_PARTS = ("make", "next", "check", "place")
_ALONE = 100
"""Batches that are made without Grain's thread, to time them."""
_MASKS = {"tokens": "mask", "source": "source_mask", "target": "target_mask"}


@dataclass(frozen=True)
class Feeding:
    """One kind of data, with the model that is fed."""

    name: str
    experiment: ExperimentConfig

    @property
    def title(self) -> str:
        """For people."""
        data, rows = self.experiment.data, self.experiment.training.batch_size
        if isinstance(data, PairData):
            return f"{self.name}: B {rows}, S {data.source_length}, T {data.target_length}"
        return f"{self.name}: B {rows}, T {data.context_length}"


def full() -> list[Feeding]:
    """The experiments as they are, and the same data for the small GPT of benchmarks.train_step and its like."""
    found = [Feeding(name, EXPERIMENTS[name].config) for name in ("python-docs", "dates", "masked-docs")]
    gpt = small_gpt()
    models = {
        "python-docs": gpt,
        "masked-docs": replace(gpt, encoder=gpt.decoder, decoder=None),
    }
    for name, model in models.items():
        config = EXPERIMENTS[name].config
        data: Any = replace(config.data, context_length=256)  # type: ignore[arg-type]
        training = replace(config.training, batch_size=8)
        found.append(
            Feeding(name, replace(config, model=replace(model, vocab_size=None), data=data, training=training))
        )
    return found


def quick() -> list[Feeding]:
    """One of each kind with a model of no size: whether it runs, not how fast."""
    found = []
    for name in ("python-docs", "dates", "masked-docs"):
        config = EXPERIMENTS[name].config
        model = replace(tiny(config.model), vocab_size=None)
        found.append(Feeding(name, replace(config, model=model, training=replace(config.training, batch_size=4))))
    return found


class Feed:
    """One experiment: its batches, and the step that takes them."""

    def __init__(self, experiment: ExperimentConfig) -> None:
        import jax

        from jax_tformer.data.pipeline import build_pipeline, build_tokenizer_for
        from jax_tformer.model.functional import transformer
        from jax_tformer.run.preparing import state_shardings
        from jax_tformer.sharding import make_mesh
        from jax_tformer.training.optimizer import optimizer
        from jax_tformer.training.step import init_state, train_step

        training = experiment.training
        tokenizer = build_tokenizer_for(experiment.data)
        net = transformer(without_dropout(experiment.model.with_vocab_size(tokenizer.vocab_size)))
        tx = optimizer(experiment.optimizer, training.steps)
        self._vocab_size = net.config.vocab_size
        self._pipeline = build_pipeline(experiment.data, training, tokenizer)
        self._batches = self._pipeline.train_iterator()
        self._mesh = make_mesh(experiment.mesh, training.batch_size)
        new_state = jax.tree_util.Partial(init_state, net, tx, jax.random.key(0))
        # As in train.py: without them, the second step would be compiled anew.
        shardings = state_shardings(self._mesh, tx, jax.eval_shape(new_state))
        self._state = jax.jit(new_state, out_shardings=shardings)()
        options = compiler_options()
        self._step = jax.jit(
            train_step(net, tx), out_shardings=(shardings, None), donate_argnums=0, compiler_options=options
        )

    def deliver(self, seconds: float) -> dict[str, float]:
        """Batches one after another, as train.py takes them: tokens a second, and microseconds a batch of each part.

        "make" is a batch made here, without Grain's thread: what "next" would take if nothing were made in advance.
        """
        tokens, taken = 0, list[dict[str, float]]()
        began = time.perf_counter()
        while not taken or time.perf_counter() - began < seconds:
            batch, _, times = self._next()
            tokens += _tokens(batch)
            taken.append(times)
        parts = {name: statistics.fmean(times[name] for times in taken) for name in taken[0]}
        alone = min(len(taken), _ALONE)
        began = time.perf_counter()
        for number in range(alone):
            self._pipeline.train[number]
        parts["make"] = (time.perf_counter() - began) / alone
        whole = len(taken) * sum(parts[name] for name in taken[0])
        microseconds = {f"{name}_microseconds": 1e6 * part for name, part in parts.items()}
        return {"tokens_per_second": tokens / whole, "batches_per_second": len(taken) / whole, **microseconds}

    def train(self, count: int) -> float:
        """Tokens a second that steps alone take, each waited for; the first call compiles."""
        import jax

        tokens, seconds = 0, 0.0
        for _ in range(count):
            batch, placed, _ = self._next()
            tokens += _tokens(batch)
            began = time.perf_counter()
            self._state, _ = jax.block_until_ready(self._step(self._state, placed))
            seconds += time.perf_counter() - began
        return tokens / seconds

    def _next(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
        import jax

        from jax_tformer.data.batches import check_batch_ids
        from jax_tformer.sharding import place_batch

        clock = [time.perf_counter()]
        batch = next(self._batches)
        clock.append(time.perf_counter())
        check_batch_ids(batch, self._vocab_size)
        clock.append(time.perf_counter())
        placed = jax.block_until_ready(place_batch(self._mesh, batch))
        clock.append(time.perf_counter())
        parts = {"next": clock[1] - clock[0], "check": clock[2] - clock[1], "place": clock[3] - clock[2]}
        return batch, placed, parts


def _tokens(batch: dict[str, Any]) -> int:
    """Those that are no padding, as a step counts them."""
    return sum(
        int(batch[_MASKS[name]].sum()) if _MASKS[name] in batch else batch[name].size
        for name in _MASKS
        if name in batch
    )


def measure(feeding: Feeding, session: Session, rounds: int, seconds: float, steps: int) -> dict[str, Any]:
    """Input and step of one experiment, by turns."""
    session.say(f"{feeding.title} ...")
    others, side = Neighbours(), session.start("benchmarks.input_pipeline:Feed", feeding.experiment)
    try:
        side.call("train", 1)
        given = {"deliver": seconds, "train": steps}
        turns = by_turns(list(given), rounds, lambda name: side.call(name, given[name]))
    finally:
        side.close()
    delivered = {name: spread([turn[name] for turn in turns["deliver"]]) for name in turns["deliver"][0]}
    step = spread(turns["train"])
    return {
        "name": feeding.name,
        "title": feeding.title,
        **delivered,
        "step_tokens_per_second": step,
        "times_the_step": delivered["tokens_per_second"]["median"] / step["median"],
        "other_work": others.share(),
    }


def main(arguments: Sequence[str]) -> int:
    """Status 1 where a side fails; that an input is below the bar is in the figures."""
    return run_benchmark("input_pipeline", __doc__, arguments, _measure)


def _measure(session: Session) -> Report:
    feedings, rounds, seconds, steps = (quick(), 1, 0.1, 1) if session.quick else (full(), 3, 0.5, 3)
    found = [measure(feeding, session, session.rounds(rounds), seconds, steps) for feeding in feedings]
    table = make_table("input alone, and the step that takes it", _COLUMNS, [_row(case) for case in found])
    busy = [line for case in found for line in other_work(case["title"], case["other_work"])]
    slowest = min(case["times_the_step"] for case in found)
    return Report({"bar": BAR, "cases": found, "least_times_the_step": slowest}, [table, *busy], _NOTES)


_COLUMNS = ("", "tokens/s", "step: tokens/s", "times the step", "make us", "next us", "check us", "place us")
_NOTES = (
    f"Grain's iterator, the check of the ids and the placement on the device, one batch after another, without a step; "
    f"the bar is {BAR:.0f} times what the step takes. Padding does not count.",
    "make: a batch made alone, in one thread; next: what Grain's thread, which makes batches in advance, leaves of "
    "that; check: that all ids are in the vocabulary; place: device_put, waited for. Microseconds a batch.",
    "The rows with T 256 are small GPT models, 6 layers of 384, decoder and encoder.",
)


def _row(found: dict[str, Any]) -> list[str]:
    numbers = [found["tokens_per_second"]["median"], found["step_tokens_per_second"]["median"]]
    parts = [found[f"{name}_microseconds"]["median"] for name in _PARTS]
    times = f"{found['times_the_step']:.0f}"
    return [found["title"], *(f"{number:,.0f}" for number in numbers), times, *(f"{part:.0f}" for part in parts)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
