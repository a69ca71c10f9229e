"""One model trained by all sides by turns, with the rate of matrix products between."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bounds import best_way
from benchmarks.flops import Flops, training_flops
from benchmarks.harness import Alone, Here, SideFailed, Spread, by_turns
from benchmarks.matmul import Shape, of_type
from benchmarks.output import Session
from benchmarks.training_cases import TrainingCase
from jax_tformer.model.functional import transformer
from jax_tformer_comparison.machine import Neighbours

OURS, EAGER, COMPILED, THEIRS, THEIRS_COMPILED = (
    "ours",
    "reference",
    "reference compiled",
    "hugging face",
    "hugging face compiled",
)
REFERENCES = (EAGER, COMPILED)
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
"""Sides that start from the same weights report losses no further apart than this, relatively."""
_PRODUCTS = "products"
_SEED = 0


@dataclass
class SideFigures:
    """What was measured of one side."""

    label: str
    first_step: float
    """Seconds, compilation included."""
    losses: list[float]
    """Of the first two steps."""
    seconds: list[float]
    """Of the steps that count."""
    peak_memory: int
    device_memory: int | None

    @property
    def step(self) -> Spread:
        """Seconds of one step."""
        return Spread.of(self.seconds)


@dataclass
class CaseFigures:
    """One case: all sides, and whether they computed the same."""

    case: TrainingCase
    flops: Flops
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Operations a second of matrix products between the turns."""
    sides: dict[str, SideFigures] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Sides that could not be measured, and why."""
    other_work: float | None = None

    def disagreement(self) -> dict[str, float]:
        """How far each side's first losses are from ours, relatively; without those that have weights of their own."""
        ours = self.sides[OURS].losses
        return {
            name: max(abs(x - y) / abs(y) for x, y in zip(side.losses, ours, strict=True))
            for name, side in self.sides.items()
            if name != OURS and not _own_weights(self.case, name)
        }

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        compute = self.case.config.compute.dtype
        way, rate = best_way(of_type(self.rates, compute))
        floor = self.flops.needed / rate
        references = {name: self.sides[name].step.median for name in REFERENCES if name in self.sides}
        faster = min(references, key=references.__getitem__) if references else None
        disagreement = self.disagreement()
        return {
            "model": self.case.model,
            "name": self.case.name,
            "shape": self.case.shape._asdict(),
            "tokens": self.case.shape.tokens,
            "dtype": compute,
            "flops": {**self.flops._asdict(), "needed": self.flops.needed},
            "products": {"operations_per_second": rate, "way": way, "ways": self.rates},
            "floor_seconds": floor,
            "faster_reference": faster,
            "sides": {
                name: self._side(side, floor, references[faster] if faster else None)
                for name, side in self.sides.items()
            },
            "absent": self.absent,
            "disagreement": disagreement,
            "tolerance": TOLERANCE[compute],
            "agreed": all(distance <= TOLERANCE[compute] for distance in disagreement.values()),
            "other_work": self.other_work,
        }

    def _side(self, side: SideFigures, floor: float, reference: float | None) -> dict[str, Any]:
        median = side.step.median
        return {
            "label": side.label,
            "step_seconds": side.step._asdict(),
            "steps": len(side.seconds),
            "tokens_per_second": self.case.shape.tokens / median,
            "first_step_seconds": side.first_step,
            "compile_seconds": max(side.first_step - median, 0.0),
            "peak_memory": side.peak_memory,
            "device_memory": side.device_memory,
            "of_rate": floor / median,
            "times_floor": median / floor,
            "times_reference": None if reference is None else reference / median,
            "losses": side.losses,
        }


def measure_case(case: TrainingCase, session: Session, *, compiled: bool) -> CaseFigures:
    """All sides of a case; those of torch.compile only if `compiled`.

    Raises SideFailed where ours fails; another side may be absent.
    """
    session.say(f"{case.name} ...")
    device, others = session.options.device, Neighbours()
    shape = case.shape
    found = CaseFigures(case, training_flops(transformer(case.config), shape.rows, shape.length, shape.source))
    products = session.start(
        "benchmarks.matmul:Products", device, *_products(case, device, quick=session.options.quick)
    )
    sides = _start(case, session, compiled)
    try:
        first = _first_steps(sides, found, session)
        turns = by_turns(
            [*first, _PRODUCTS],
            session.options.rounds or (2 if session.options.quick else case.rounds),
            lambda name: products.call("measure", 1) if name == _PRODUCTS else _turn(sides[name], case.steps),
        )
        for rates in turns.pop(_PRODUCTS):
            for way, found_rates in rates.items():
                found.rates.setdefault(way, []).extend(found_rates)
        for name, seconds in turns.items():  # of each turn: the loss of its first step, and the others' seconds
            found.sides[name] = SideFigures(
                _label(case, name),
                first[name][0],
                [first[name][1], seconds[0][0]],
                [second for _, turn in seconds for second in turn],
                sides[name].peak_memory(),
                sides[name].call("device_memory"),
            )
    finally:
        for side in (*sides.values(), products):
            side.close()
    found.other_work = others.share()
    return found


def _start(case: TrainingCase, session: Session, compiled: bool) -> dict[str, Alone | Here]:
    given = (case.config, case.shape, _SEED, session.options.device)
    reference, theirs = "benchmarks.training_torch:Reference", "benchmarks.training_hugging_face:HuggingFace"
    sides = {
        OURS: session.start("benchmarks.training_ours:Ours", *given),
        EAGER: session.start(reference, *given, uses_jax=False),
    }
    if compiled:
        sides[COMPILED] = session.start(reference, *given, True, uses_jax=False)
    sides[THEIRS] = session.start(theirs, *given, uses_jax=False)
    if compiled and session.options.device == "gpu":
        sides[THEIRS_COMPILED] = session.start(theirs, *given, True, uses_jax=False)
    return sides


def _first_steps(
    sides: Mapping[str, Alone | Here], found: CaseFigures, session: Session
) -> dict[str, tuple[float, float]]:
    """Seconds and loss of the first step of every side that can train at all."""

    def attempt(name: str, method: str, *given: Any) -> Any:
        try:
            return sides[name].call(method, *given)
        except SideFailed as error:
            if name == OURS:
                raise
            found.absent[name] = str(error)
            return None

    # First of all, every side is made: what takes the processors meanwhile must not count as compilation.
    for name in sides:
        attempt(name, "device_memory")
    first = {}
    for name in sides:
        taken = None if name in found.absent else attempt(name, "steps", 1)
        if taken is not None:
            first[name] = taken[0], sides[name].call("loss")
            session.say(f"  {_label(found.case, name)}: the first step took {taken[0]:.1f} s")
    return first


def _turn(side: Alone | Here, steps: int) -> tuple[float, list[float]]:
    """The loss of one step that is not counted, and the seconds of those that are."""
    # The first one finds caches cold and memory handed back, as no step does that follows another.
    side.call("steps", 1)
    return side.call("loss"), side.call("steps", steps)


def _products(case: TrainingCase, device: str, *, quick: bool) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Shapes and types whose rate is measured: a large square, and a feed-forward layer of the case's own."""
    width, inner = case.config.d_model, case.config.output_stack.feedforward_width
    tokens = case.shape.rows * case.shape.length
    square = 64 if quick else 2048 if device == "cpu" else 8192
    shapes = ((square, square, square), (tokens, width, inner), (tokens, inner, width))
    return shapes, ("float32",) if device == "cpu" else ("bfloat16", "float32")


def _own_weights(case: TrainingCase, name: str) -> bool:
    translates = case.config.encoder is not None and case.config.decoder is not None
    return translates and name in (THEIRS, THEIRS_COMPILED)


def _label(case: TrainingCase, name: str) -> str:
    theirs = "BART (HF), own weights" if _own_weights(case, name) else "HF"
    return {
        OURS: "jax_tformer",
        EAGER: "torch_ref",
        COMPILED: "torch_ref, torch.compile",
        THEIRS: theirs,
        THEIRS_COMPILED: f"{theirs}, torch.compile",
    }[name]
