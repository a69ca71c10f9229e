"""Writes the model of a run as a folder that Hugging Face's `from_pretrained` opens."""

from pathlib import Path

from jax_tformer.data.framing import Framing
from jax_tformer.data.tokenizer_sources import load_tokenizer
from jax_tformer.data.tokenizers import Tokenizer
from jax_tformer.errors import InputError
from jax_tformer.experiment import ExperimentConfig, MaskedTextData, PairData
from jax_tformer.model.functional import transformer
from jax_tformer.model.lora import without_adapters
from jax_tformer.pretrained.adapters import save_adapters
from jax_tformer.pretrained.origin import read_origin
from jax_tformer.pretrained.saving import StoredDtype, described, save_pretrained
from jax_tformer.run.restoring import Which, load_trained
from jax_tformer.run.run_folder import RunFolder


def require_new_folder(out: Path) -> None:
    """Raises InputError if something is in `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is there already; expected a new or empty folder")


def require_expressible(experiment: ExperimentConfig, architecture: str | None = None) -> None:
    """Raises InputError if no class of `transformers`, or not this one, can express the model of a run."""
    if experiment.init is None:
        described(transformer(without_adapters(experiment.model.with_vocab_size(1))), architecture)


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
        tokenizer = _adding(tokenizer, experiment)
    save_pretrained(out, net, trained.params, tokenizer, architecture=architecture, dtype=dtype)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    return f"step {trained.step} of {run.path} is in {out}/: {names}"


def export_adapters(run: RunFolder, out: Path, step: Which = None, *, architecture: str | None = None) -> str:
    """Writes the adapters of a checkpoint in the format of PEFT to the new folder `out`; returns a line that says so.

    They are for the folder that the run began with; without one, for a model of the class `architecture` with the
    parameters that the run began with. Raises InputError as `load_trained` and `save_adapters` do.
    """
    trained = load_trained(run, step, merge=False)
    net, base = trained.net, run.read_config().init
    net.origin = read_origin(run.origin) if run.origin.exists() else None
    save_adapters(out, net, trained.params, architecture=architecture, base=base)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    return f"the adapters of step {trained.step} of {run.path} are in {out}/: {names}"


def _adding(tokenizer: Tokenizer, experiment: ExperimentConfig) -> Tokenizer:
    """Returns a tokenizer that itself adds what the batches of the run have around texts."""
    before, after = list[int](), list[int]()
    if isinstance(experiment.data, PairData):
        after = [tokenizer.require("end", "for pairs")]
    elif not isinstance(experiment.data, MaskedTextData) and tokenizer.start_id is not None:
        before = [tokenizer.start_id]
    return tokenizer.adding(Framing(tuple(before), tuple(after)))
