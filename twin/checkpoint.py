"""What a comparison takes from a Hugging Face folder: the weights, and the same model in `transformers`."""

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import InputError
from jax_tformer.config.experiment import OptimizerConfig, TrainingConfig
from twin.options import Plan
from twin.sides import Side, Tensors


def checkpoint_weights(plan: Plan) -> Tensors | None:
    """Returns the weights of the checkpoint that the comparison begins with, named as torch_ref's; None: none."""
    if plan.experiment.init is None:
        return None
    from jax_tformer.hub.loading import load_pretrained
    from jax_tformer.hub.names import to_reference

    return to_reference(load_pretrained(plan.experiment.init, dtype=plan.dtype)[1])


def transformers_side(
    plan: Plan, model: TransformerConfig, optimization: OptimizerConfig, training: TrainingConfig, device: str
) -> Side | None:
    """Returns the side of `transformers`; None without a checkpoint, or where it cannot take part.

    It has neither our dropout masks nor our adapters. Raises InputError if it is not installed.
    """
    init = plan.experiment.init
    if init is None or plan.dropout == "shared" or model.lora is not None:
        return None
    try:
        from twin.transformers_side import TransformersSide

        return TransformersSide(init, model, optimization, training, device)
    except ImportError as error:
        raise InputError(
            "a comparison with --init needs transformers; in the repository, pip install '.[parity]' adds it"
        ) from error
