"""Begins a run with a Hugging Face folder (its architecture, tokenizer and weights), and writes its model as one.

The run keeps the folder's settings and tokenizer in RUN/origin, and does not need the folder again once it has saved a
checkpoint.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError, require
from jax_tformer.config.experiment import (
    ExperimentConfig,
    MaskedTextData,
    PairData,
    TextData,
    TokenizerConfig,
    trains_on,
)
from jax_tformer.data.pipeline import build_tokenizer_for
from jax_tformer.data.tokenizers import Framing, Tokenizer, check_vocabulary, load_tokenizer
from jax_tformer.files import changed_fields, list_files, shortened, to_dict, user_path
from jax_tformer.functional import Params, transformer
from jax_tformer.hub.families import CannotExpress, config_from_huggingface
from jax_tformer.hub.folder import Origin, defaults_of, open_tensors, read_origin
from jax_tformer.hub.pretrained import StoredDtype, described, load_pretrained, save_pretrained
from jax_tformer.lora import without_adapters
from jax_tformer.runs.checkpoints import Which
from jax_tformer.runs.folder import RunFolder, load_trained

_LEARNING_RATE = 5e-5
"""What `transformers` fine-tunes with by default; the experiments' own rates are for new weights."""
_FREE = ("dropout", "compute", "lora")
"""Parts of a model's config that a fine-tuning may choose."""


def experiment_from(preset: ExperimentConfig, init: str) -> ExperimentConfig:
    """Returns `preset` with the architecture and the tokenizer of the Hugging Face folder `init`.

    Raises InputError if the folder is none, if we do not have its class or a setting, or if such a model does not suit
    the data of `preset`.
    """
    folder = user_path(init)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; expected that of a Hugging Face model after --init")
    origin = read_origin(folder)
    # The arrays tell what config.json does not, such as whether a T5 has a head of its own.
    model, data = config_from_huggingface(origin.config, open_tensors(folder)), preset.data
    _require_kind(folder, origin, model, preset)
    if not (folder / "tokenizer.json").exists():
        raise InputError(f"{folder} has no tokenizer.json; expected one, as save_pretrained of a fast tokenizer writes")
    tokenizer = TokenizerConfig("huggingface", name=init)
    if isinstance(data, PairData):
        data = replace(
            data,
            tokenizer=tokenizer,
            source_length=_limit_length(data.source_length, model.encoder),
            target_length=_limit_length(data.target_length, model.decoder),
        )
    else:
        context = _limit_length(data.context_length, model.output_stack)
        data = replace(data, tokenizer=tokenizer, context_length=context)
    optimizer = replace(preset.optimizer, learning_rate=_LEARNING_RATE)
    return replace(preset, model=model, data=data, optimizer=optimizer, init=init)


def require_same_architecture(experiment: ExperimentConfig, begun: ExperimentConfig) -> None:
    """Raises InputError if flags have changed what the checkpoint decides; `begun` is what `experiment_from` said."""
    free = {name: getattr(experiment.model, name) for name in _FREE}
    changed = changed_fields(to_dict(replace(begun.model, **free)), to_dict(experiment.model))
    told = [f"model.{name} is {asked!r} and there {there!r}" for name, (there, asked) in changed.items()]
    require(
        not told,
        f"the checkpoint {begun.init} decides its architecture, and flags contradict it: {shortened(told)}; leave them "
        "out (model.dropout, model.compute and --lora may change)",
    )
    require(
        experiment.data.tokenizer == begun.data.tokenizer,
        f"the checkpoint {begun.init} has a tokenizer of its own; leave --data.tokenizer out",
    )


def new_tokenizer(experiment: ExperimentConfig) -> Tokenizer:
    """Makes the tokenizer of a new run: that of its checkpoint, or the one that its data describes.

    Raises InputError if it needs more rows than the model's vocabulary has.
    """
    vocabulary = experiment.model.vocab_size
    if experiment.init is None:
        tokenizer = build_tokenizer_for(experiment.data)
    else:
        folder, translates = user_path(experiment.init), isinstance(experiment.data, PairData)
        defaults, _ = defaults_of(read_origin(folder), folder, translates=translates, vocabulary=vocabulary)
        tokenizer = load_tokenizer(folder).framed(defaults.start_id, defaults.end_ids or None)
    check_vocabulary(tokenizer, vocabulary or tokenizer.vocab_size)
    return tokenizer


def given_parameters(experiment: ExperimentConfig, mesh: Mesh) -> Params | None:
    """Reads the weights of a new run's checkpoint, each device its part; returns None if the run has no checkpoint."""
    if experiment.init is None:
        return None
    return load_pretrained(experiment.init, dtype=experiment.model.compute.parameter_dtype, mesh=mesh)[1]


def require_expressible(experiment: ExperimentConfig, architecture: str | None = None) -> None:
    """Raises InputError if no class of `transformers`, or not this one, can express the model of a run."""
    if experiment.init is not None:
        return
    try:
        model = _bound_positions(experiment.model.with_vocab_size(1), experiment.data)
        with jax.enable_x64(True):  # not all of JAX is set up yet
            described(transformer(without_adapters(model)), architecture)
    except CannotExpress as error:
        flags = " ".join(_flag(name, possible) for name, (possible, _) in error.changed.items())
        raise InputError(
            f"{f'{architecture} cannot' if architecture else 'no class of transformers can'} express this model; one "
            f"of type {error.model_type!r} is trained with {flags}; begin a run with these flags, or export in "
            "PyTorch's names: jax-tformer export without --huggingface"
        ) from error


def export_pretrained(
    run: RunFolder,
    out: Path,
    step: Which = None,
    *,
    architecture: str | None = None,
    dtype: StoredDtype | None = None,
) -> str:
    """Writes the model of a checkpoint to the new folder `out`; returns a line that says so.

    A run that began with a Hugging Face folder keeps its class, its settings, its tokenizer's files and its chat
    template. Raises InputError as `load_trained` and `save_pretrained` do.
    """
    experiment = run.read_config()
    trained = load_trained(run, step)
    net, tokenizer = trained.net, trained.tokenizer
    if run.origin.exists():
        net.origin = read_origin(run.origin)
        tokenizer = load_tokenizer(run.origin)
    else:
        net = transformer(_bound_positions(net.config, experiment.data))
        tokenizer = _add_framing(tokenizer, experiment)
    save_pretrained(out, net, trained.params, tokenizer, architecture=architecture, dtype=dtype)
    return f"step {trained.step} of {run.path} is in {out}/: {list_files(out)}"


def _flag(field: str, value: object) -> str:
    before, _, name = f"--model.{field.replace('_', '-')}".rpartition(".")
    if isinstance(value, bool):
        return f"{before}.{name if value else f'no-{name}'}"
    return f"{before}.{name} {value}"


def _bound_positions(model: TransformerConfig, data: TextData | PairData) -> TransformerConfig:
    """Returns the model of a run with a limit of positions where it has none: the length of what it was trained on.

    Every class with computed positions must say a limit, and no number depends on it.
    """
    length = max(data.source_length, data.target_length) if isinstance(data, PairData) else data.context_length

    limited: dict[str, Any] = {
        name: replace(stack, max_positions=stack.max_positions or length)
        for name, stack in model.stacks.items()
        if stack.positions.startswith(("rotary", "sinusoidal"))
    }
    return replace(model, **limited)


def _require_kind(folder: Path, origin: Origin, model: TransformerConfig, preset: ExperimentConfig) -> None:
    wanted, kind = preset.data.kind, trains_on(model)
    require(
        kind == wanted,
        f"{folder} holds a {origin.architecture}, which trains on {kind}; expected a model for {wanted}; "
        f"name the experiment {kind}",
    )
    require(
        model.predicts_tokens,
        f"{folder} holds a {origin.architecture}, whose head is {model.head!r}; expected a head that predicts tokens "
        f"({'BertForMaskedLM' if wanted == 'masked' else 'a class for causal or conditional generation'} or the like)",
    )


def _limit_length(length: int, stack: object) -> int:
    positions = getattr(stack, "max_positions", None)
    return length if positions is None else min(length, positions)


def _add_framing(tokenizer: Tokenizer, experiment: ExperimentConfig) -> Tokenizer:
    """Returns a tokenizer that itself adds what the batches of the run have around texts."""
    before, after = list[int](), list[int]()
    if isinstance(experiment.data, PairData):
        after = [tokenizer.require("end", "for pairs")]
    elif not isinstance(experiment.data, MaskedTextData) and tokenizer.start_id is not None:
        before = [tokenizer.start_id]
    return tokenizer.adding(Framing(tuple(before), tuple(after)))
