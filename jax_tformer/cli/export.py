"""Write the model of a run for use elsewhere: weights, config and tokenizer, each in a file of its own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from jax_tformer.config import Dtype
from jax_tformer.config.errors import WHY, explained, require
from jax_tformer.files import list_files, new_folder, require_new_folder, user_path, write_json
from jax_tformer.runs.folder import (
    RunFolder,
    export_pretrained,
    load_trained,
    parse_checkpoint,
    require_expressible,
)
from jax_tformer.terminal import parse


@dataclass(frozen=True)
class ExportOptions:
    """What is written where."""

    run: tyro.conf.Positional[Path]
    """The folder of a run."""
    out: tyro.conf.Positional[Path]
    """A new or empty folder, for model.safetensors, config.json and the files of the tokenizer."""
    checkpoint: str = "newest"
    """newest, best (by held-out loss), the step of a checkpoint that the run still has, average (of all steps, in runs
    with --training.average), or last-N (the mean of the newest N)."""
    huggingface: bool = False
    """Write what Hugging Face's from_pretrained opens, instead of PyTorch's names for torch_ref."""
    adapters: bool = False
    """Write only the adapters of a run with --lora, in the format of PEFT; without it they are merged."""
    architecture: str | None = None
    """With --huggingface or --adapters, the class, such as GPTNeoXForCausalLM; None: that of the run's --init, or with
    --huggingface the first that can express the model."""
    dtype: Dtype | Literal["float16"] | None = None
    """With --huggingface, the type of the weights there; None: as they are."""


def main(arguments: Sequence[str]) -> int:
    options = parse(ExportOptions, arguments, prog="jax-tformer export", description=__doc__ or "")
    step = parse_checkpoint(options.checkpoint)
    out = user_path(options.out)
    for name in ("architecture", "dtype"):
        given = getattr(options, name)
        served = options.huggingface or (options.adapters and name == "architecture")
        require(served or given is None, f"--{name} is {given!r} without --huggingface; expected both, or neither")
    require(
        not (options.huggingface and options.adapters),
        "there are --huggingface and --adapters; expected one of them: the whole model, or its adapters alone",
    )
    require_new_folder(out)

    run = RunFolder(user_path(options.run))
    experiment = run.read_config()
    if options.huggingface:
        require_expressible(experiment, options.architecture)
        print(export_pretrained(run, out, step, architecture=options.architecture, dtype=options.dtype))
        return 0
    adapted = experiment.model.lora is not None
    require(adapted or not options.adapters, f"{run.path} has no adapters; leave --adapters out")
    trained = load_trained(run, step, merge=not options.adapters)
    if options.adapters:
        from jax_tformer.hub.adapters import save_adapters
        from jax_tformer.hub.folder import read_origin

        net = trained.net
        net.origin = read_origin(run.origin) if run.origin.exists() else None
        require(
            net.origin is not None or options.architecture is not None,
            "the run began with new weights; expected --architecture, the class that its adapters are for",
        )
        # They are for the folder that the run began with, or for the parameters that it began with.
        save_adapters(out, net, trained.params, architecture=options.architecture, base=experiment.init)
    else:
        import safetensors

        from jax_tformer.hub.names import save_weights

        with new_folder(out) as whole:
            trained.tokenizer.save(whole)
            write_json(whole / "config.json", asdict(trained.net.config))
            with explained(f"cannot write {out}: {WHY}", safetensors.SafetensorError):
                save_weights(whole / "model.safetensors", trained.params, trained.net.config)
    told = "the adapters of {} are in" if options.adapters else "{} is in"
    print(told.format(f"step {trained.step} of {run.path}"), f"{out}/: {list_files(out)}")
    return 0
