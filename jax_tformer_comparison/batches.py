"""The batches of a comparison: those that train.py would train on, by number."""

import dataclasses
from collections.abc import Iterator

from jax_tformer.data.ids import check_batch_ids, check_vocabulary
from jax_tformer.data.pipelines import build_pipeline, build_tokenizer_for
from jax_tformer.experiment import ExperimentConfig
from jax_tformer_comparison.sides import Tensors


class Batches:
    """Training batches by seed. They are made when asked for: a thread that prepares them would disturb the timing."""

    def __init__(self, experiment: ExperimentConfig, steps: int) -> None:
        """`steps` batches for each seed. Raises InputError if the text or the tokenizer cannot be had."""
        self._experiment, self._steps = experiment, steps
        self._tokenizer = build_tokenizer_for(experiment.data)
        self.vocab_size = experiment.model.vocab_size or self._tokenizer.vocab_size
        """Rows of the model's token table."""
        check_vocabulary(self._tokenizer, self.vocab_size)

    def __call__(self, seed: int) -> Iterator[Tensors]:
        """The batches of one seed, from the first; raises InputError if the text is too little."""
        training = dataclasses.replace(self._experiment.training, seed=seed)
        batches = build_pipeline(self._experiment.data, training, self._tokenizer).train
        for number in range(self._steps):
            batch = batches[number]
            check_batch_ids(batch, self.vocab_size)
            yield batch
