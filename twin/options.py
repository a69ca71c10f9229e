"""The options of compare.py: the fields of an experiment, and how to compare it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jax_tformer.cli.train import SHORT_NAMES, choose_experiment, with_adapters, with_own_tokenizer
from jax_tformer.config import DropoutConfig, Dtype, TransformerConfig
from jax_tformer.config.errors import Positive, Rate, check_fields, require
from jax_tformer.config.experiment import (
    ExperimentConfig,
    MaskedTextData,
    OptimizerConfig,
    PairData,
    TextData,
    TrainingConfig,
)
from jax_tformer.config.presets import EXPERIMENTS
from jax_tformer.files import user_path
from jax_tformer.terminal import given_flags, parse

DEFAULT_EXPERIMENT = "dates"
"""The experiment with the shortest steps."""
_USAGE = """usage: compare.py [EXPERIMENT] [--steps N] [--out FOLDER] [--dtype float64|float32|bfloat16]
                  [--init FOLDER] [--dropout off|shared] [--seeds N] [--torch-compile] [--FIELD VALUE ...]

Trains the JAX model and the PyTorch reference side by side, from the same weights on the same batches, and
writes a report: report.html, report.json, curves.csv and pictures. Without EXPERIMENT, trains dates.
With --init, fine-tunes the model of a Hugging Face folder, in transformers as well. --lora.rank 8, or any other
--lora.FIELD, trains low-rank adapters alone (LoRA), in JAX and in the reference.
Exit status: 0 within the bars, or if there is no bar (bfloat16, --truth no); 1 beyond the bars or not
comparable; 2 for bad input.

experiments:
{experiments}

compare.py EXPERIMENT --help shows every option and field with its default and meaning."""
_DEFAULT_STEPS, _DEFAULT_FLOAT64_STEPS, _DEFAULT_DROPOUT_RATE = 300, 100, 0.1
_TRUTH_STEPS, _TRUTH_PARAMETERS = 1000, 10_000_000
"""The most steps and parameters for which --truth auto trains in float64, which takes about twice PyTorch's time."""


@dataclass(frozen=True)
class CompareOptions:
    """How to compare, and the fields of the experiment."""

    model: TransformerConfig
    data: TextData | MaskedTextData | PairData
    optimizer: OptimizerConfig
    training: TrainingConfig
    init: str | None = None
    """Hugging Face folder whose model is fine-tuned, in `transformers` too unless with adapters or shared dropout;
    None: new weights."""
    steps: Positive | None = None
    """Steps to compare, from the first; None: 300, or 100 in float64, or fewer if the training is shorter.
    Rounding grows: after about 130 steps of dates even two float64 trainings are more than 1e-12 apart."""
    out: Path | None = None
    """Folder of the report: new, empty, or with an older report; None: runs/EXPERIMENT-comparison."""
    dtype: Dtype = "float32"
    """Type of parameters and arithmetic in both frameworks. float64 shows whether they compute the same function."""
    dropout: Literal["off", "shared"] = "off"
    """off: all rates are 0; shared: PyTorch gets the masks that JAX draws."""
    dropout_rate: Rate | None = None
    """Of embedding, attention, residual and feedforward; None: the experiment's rates, or 0.1 if it has none."""
    seeds: Positive = 1
    """Number of runs, with training.seed, training.seed + 1 and so on; each has its own weights and batches."""
    truth: Literal["auto", "yes", "no"] = "auto"
    """Also train in float64, the truth that narrower types are measured against; auto: if that is affordable."""
    torch_compile: bool = False
    """Compile the PyTorch model with torch.compile."""
    memory: bool = True
    """At the end, measure memory and speed again with each framework alone in a process; takes some seconds."""


@dataclass(frozen=True)
class Plan:
    """The complete and checked settings of a comparison."""

    name: str
    """The experiment's name."""
    experiment: ExperimentConfig
    out: Path
    steps: int
    seeds: tuple[int, ...]
    dtype: Dtype
    dropout: Literal["off", "shared"]
    truth: Literal["auto", "yes", "no"]
    torch_compile: bool
    memory: bool

    def needs_truth(self, parameters: int) -> bool:
        """Whether to train in float64 too, for a model with this many parameters."""
        if self.truth != "auto":
            return self.truth == "yes"
        return self.dtype != "float64" and self.steps <= _TRUTH_STEPS and parameters <= _TRUTH_PARAMETERS


def read_plan(arguments: Sequence[str]) -> Plan:
    """Parses the command line of compare.py.

    Raises InputError for an unknown experiment, field or value, in one line. `--help` prints and exits.
    """
    name, rest = choose_experiment(arguments, DEFAULT_EXPERIMENT, _USAGE)
    preset, flags = EXPERIMENTS[name], given_flags(rest, SHORT_NAMES)
    init = flags.get("--init")
    config = preset.config
    if init is not None:
        from jax_tformer.runs.session import experiment_from

        config = experiment_from(config, init)
    config = with_adapters(config, flags)
    default = CompareOptions(config.model, config.data, config.optimizer, config.training, config.init)
    options = parse(
        CompareOptions,
        rest,
        prog=f"compare.py {name}",
        description=preset.description,
        default=default,
        # Here --steps is a separate option.
        short_names={short: long for short, long in SHORT_NAMES.items() if short != "--steps"},
    )
    check_fields(options)
    require(
        options.truth != "yes" or options.dtype != "float64",
        "truth is 'yes' and dtype is 'float64'; float64 is the truth already: leave --truth out",
    )
    model = _model(options, config.model)
    data = with_own_tokenizer(options.data, flags) if options.init is None else options.data
    experiment = ExperimentConfig(model, data, options.optimizer, options.training, init=options.init)
    if experiment.init is not None:
        from jax_tformer.runs.session import require_same_architecture

        require_same_architecture(experiment, config)
    return Plan(
        name=name,
        experiment=experiment,
        out=user_path(options.out or Path("runs") / f"{name}-comparison"),
        steps=_steps(options),
        seeds=_seeds(options),
        dtype=options.dtype,
        dropout=options.dropout,
        truth=options.truth,
        torch_compile=options.torch_compile,
        memory=options.memory,
    )


def _steps(options: CompareOptions) -> int:
    if options.steps is None:
        default = _DEFAULT_FLOAT64_STEPS if options.dtype == "float64" else _DEFAULT_STEPS
        return min(default, options.training.steps)
    require(
        options.steps <= options.training.steps,
        f"steps is {options.steps} and the training ends after {options.training.steps}; "
        "expected at most that many, or a longer --training.steps",
    )
    return options.steps


def _seeds(options: CompareOptions) -> tuple[int, ...]:
    first = options.training.seed
    require(
        first + options.seeds <= 2**32,
        f"seeds is {options.seeds} and training.seed is {first}; expected seeds up to 2^32 - 1",
    )
    return tuple(range(first, first + options.seeds))


def _model(options: CompareOptions, preset: TransformerConfig) -> TransformerConfig:
    """Returns the model with the type and the dropout rates of the comparison."""
    model, rates = options.model, options.model.dropout
    for field in ("dtype", "parameter_dtype"):
        require(
            getattr(model.compute, field) == getattr(preset.compute, field),
            f"model.compute.{field} is set; a comparison has one type for everything: give --dtype",
        )
    if options.dropout_rate is not None:
        require(options.dropout == "shared", "dropout_rate is set, but dropout is 'off'; give --dropout shared")
        require(options.dropout_rate > 0, "dropout_rate is 0.0; expected a rate above 0, or --dropout off")
    if options.dropout == "off":
        require(rates == preset.dropout, "model.dropout is set, but dropout is 'off'; give --dropout shared")
        rates = DropoutConfig()
    elif options.dropout_rate is not None or rates == DropoutConfig():
        rate = options.dropout_rate or _DEFAULT_DROPOUT_RATE
        rates = DropoutConfig(embedding=rate, attention=rate, residual=rate, feedforward=rate)
    return dataclasses.replace(model, dropout=rates).with_dtype(options.dtype)
