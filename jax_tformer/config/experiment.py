"""Describes a training run and its answers: data, optimizer, how long, on which devices, how tokens are chosen.

Frozen dataclasses like those of `config`, checked when they are made.
"""

import re
from typing import Literal

from jax_tformer.config import TransformerConfig
from jax_tformer.config.errors import (
    AboveZero,
    Count,
    Finite,
    NotNegative,
    Positive,
    Rate,
    Seed,
    Share,
    TokenIds,
    Words,
    checked,
    require,
    require_field,
)

TokenizerKind = Literal["bytes", "characters", "words", "bpe", "huggingface"]
TextSource = Literal["python-docs", "modular-addition", "markov-chain", "files"]
PairSource = Literal["dates", "scan-simple", "scan-length", "scan-jump", "files"]
Packing = Literal["concatenate", "best_fit", "crop"]
OptimizerName = Literal["adamw", "lion", "adafactor", "muon", "sgd"]
Schedule = Literal["constant", "cosine", "inverse_sqrt", "linear", "warmup_stable_decay"]
LengthPenaltyForm = Literal["paper", "power"]
_DRAW = "give a temperature above 0"


@checked
class TokenizerConfig:
    """How text becomes ids. The tokenizer is saved with the run."""

    kind: TokenizerKind = "bpe"
    """UTF-8 bytes, the characters of the corpus or its words (what white space divides), BPE trained on the corpus, or
    a Hugging Face tokenizer."""
    vocab_size: int | None = None
    """Vocabulary size of the trained BPE, special tokens included; None for the other kinds."""
    name: str | None = None
    """Folder or hub name of the Hugging Face tokenizer; None for the other kinds."""
    revision: str | None = None
    """Commit of the hub repository, 40 hexadecimal digits, because a name's files may change; None with a folder."""

    def __post_init__(self) -> None:
        require(
            (self.kind == "bpe") == (self.vocab_size is not None),
            f"tokenizer kind is {self.kind!r} and its vocab_size is {self.vocab_size}; "
            "expected a vocab_size with 'bpe', and --data.tokenizer.vocab-size None otherwise",
        )
        if self.vocab_size is not None:
            require(
                isinstance(self.vocab_size, int) and self.vocab_size >= 300,
                f"the tokenizer's vocab_size is {self.vocab_size!r}; expected at least 300 (256 bytes, special tokens)",
            )
            # The trainer reserves memory for all of them, and ends the process if it gets none.
            require(self.vocab_size <= 2**24, f"the tokenizer's vocab_size is {self.vocab_size}; expected at most 2^24")
        require(
            self.kind == "huggingface" or self.name is None,
            f"tokenizer kind is {self.kind!r} and its name is {self.name!r}; expected a name with 'huggingface' only",
        )
        require(
            self.revision is None
            or (self.name is not None and re.fullmatch("[0-9a-f]{40}", self.revision) is not None),
            f"the tokenizer's revision is {self.revision!r}; expected the commit of a hub name, 40 hexadecimal digits",
        )


@checked
class TextData:
    """Plain text, cut into windows of one length, for decoder-only models."""

    kind = "text"
    source: TextSource = "files"
    """python-docs: the language reference inside CPython; modular-addition: equations, of which the last word is to be
    predicted; markov-chain: letters, each of which depends on the one before; files: what --data.path names."""
    path: str | None = None
    """A text file, a folder of them, a glob, JSON lines with the text under "text", or shards of ids (.bin); or several
    of these with weights: A=0.7,B=0.3."""
    context_length: Positive = 128
    """T, tokens per window."""
    stride: Positive = 1
    """Tokens from the start of one training window to the start of the next."""
    packing: Packing | None = None
    """None: rows are windows, which know nothing of documents. Otherwise documents do not see one another: concatenate
    divides them where rows end, best_fit keeps them whole and pads rows, crop leaves out what does not fit."""
    held_out: Share = 0.1
    """Fraction of the text kept for evaluation, taken from its end; shards may have a held-out part of their own."""
    tokenizer: TokenizerConfig = TokenizerConfig("bytes")
    """How text becomes ids. The tokenizer is saved with the run."""

    def __post_init__(self) -> None:
        _require_path_fits(self.source, self.path)
        require(
            self.packing is None or self.kind == "text", f"packing is {self.packing!r}; expected None: text is masked"
        )
        require(
            self.packing is None or self.stride == 1,
            f"stride is {self.stride} and packing {self.packing!r}, which reads each document once; expected stride 1",
        )
        require(
            self.context_length > 1 or self.kind == "masked",
            "context_length is 1; expected at least 2 tokens: one that is read, and one that follows",
        )


@checked
class MaskedTextData(TextData):
    """Plain text in windows. A BERT-style encoder learns to restore masked tokens."""

    kind = "masked"
    masked: Share = 0.15
    """Fraction of tokens to restore: 80% of them become the mask token, 10% a random one, 10% stay."""


@checked
class PairData:
    """Pairs of source and target text for encoder-decoder models."""

    kind = "pairs"
    source: PairSource = "files"
    """dates: dates of many locales and styles -> ISO 8601, made as needed; scan: commands -> actions (Lake & Baroni,
    2018), held out by chance, by length, or all with jump; files: what --data.path names."""
    path: str | None = None
    """Tab-separated pairs, JSON lines with "source" and "target", or several of these with weights: A=0.7,B=0.3; or,
    with target_path, the file of sources."""
    target_path: str | None = None
    """A file of targets, one for each line of --data.path."""
    source_length: Positive = 64
    """S, the most source tokens, the end token included."""
    target_length: Positive = 64
    """T, the most target tokens, the start token included."""
    held_out: Share = 0.1
    """Fraction of the pairs kept for evaluation; the splits of SCAN have their own."""
    tokens_per_batch: Positive | None = None
    """The most tokens of source, and of target, in a batch, padding included (the paper has 25,000): batches have a few
    lengths, and the shorter their pairs, the more of them, a multiple of batch_size. None: batch_size pairs."""
    tokenizer: TokenizerConfig = TokenizerConfig("characters")
    """How text becomes ids. The tokenizer is saved with the run."""

    def __post_init__(self) -> None:
        _require_path_fits(self.source, self.path)
        require(
            self.tokens_per_batch is None or self.source != "dates",
            f"tokens_per_batch is {self.tokens_per_batch}; expected None with dates, which are all about as long",
        )
        require(
            self.target_path is None or self.path is not None,
            f"target_path is {self.target_path!r}, but path is not set; expected the file of sources as path",
        )


def _require_path_fits(source: str, path: str | None) -> None:
    require(
        source == "files" or path is None,
        f"data.path is {path!r}, but {source} needs no file; use the experiment text, pairs or shakespeare-char",
    )


@checked
class RatesConfig:
    """Factors of the learning rate, by kind of parameter."""

    matrices: NotNegative = 1.0
    """Of projections within the layers, and of adapters."""
    tables: NotNegative = 1.0
    """Of embeddings: tokens (also where they are the head), positions, token types, relative positions."""
    head: NotNegative = 1.0
    """Of what makes logits of the last layer."""
    vectors: NotNegative = 1.0
    """Of biases and the scales of norms."""


@checked
class OptimizerConfig:
    """An optimizer with clipping by global norm and a warm-up schedule."""

    name: OptimizerName = "adamw"
    """AdamW (Loshchilov & Hutter, 2019), Lion (Chen et al., 2023), Adafactor (Shazeer & Stern, 2018), Nesterov's
    SGD, or Muon (Jordan, 2024) for the matrices of layers and AdamW for the rest."""
    learning_rate: AboveZero = 1e-3
    """The highest learning rate, at the end of the warm-up; for Adafactor as a multiple of a parameter's size."""
    rates: RatesConfig = RatesConfig()
    """Factors of the learning rate, by kind of parameter."""
    schedule: Schedule = "cosine"
    """After the warm-up: constant, cosine or linear down to final_fraction, the paper's 1/sqrt(step), or constant and
    then linear."""
    warmup_steps: Count = 100
    """Steps over which the learning rate rises linearly from 0."""
    decay_share: Share = 0.2
    """Share of all steps over which warmup_stable_decay falls at the end."""
    final_fraction: NotNegative = 0.1
    """Learning rate at the last step of the schedules that fall to an end, as a fraction of the highest."""
    beta1: Rate = 0.9
    """Decay of the mean of the gradient: AdamW, Lion."""
    beta2: Rate = 0.99
    """Decay of the mean of the squared gradient (AdamW), of the mean of the gradient that is kept (Lion)."""
    eps: AboveZero = 1e-8
    """Added to the root of the mean squared gradient, outside the root: AdamW."""
    momentum: Rate = 0.95
    """Of Muon and SGD."""
    weight_decay: NotNegative = 0.1
    """On matrices (projections and tables) only; decoupled, but for SGD, where it is a part of the gradient."""
    clip_norm: AboveZero | None = 1.0
    """Largest global gradient norm; None: no clipping."""

    def __post_init__(self) -> None:
        require(
            self.schedule != "inverse_sqrt" or self.warmup_steps > 0,
            "warmup_steps is 0; the inverse_sqrt schedule needs at least 1",
        )
        require(
            self.momentum == OptimizerConfig.momentum or self.name in ("muon", "sgd"),
            f"momentum is {self.momentum} and the optimizer {self.name}; expected muon or sgd, which have one",
        )


@checked
class LossConfig:
    """What is added to the cross-entropy that trains; held-out losses have nothing of it."""

    label_smoothing: Rate = 0.0
    """Probability mass spread evenly over the vocabulary (paper, section 5.4)."""
    z_loss: NotNegative = 0.0
    """Times the square of the logarithm of the softmax's sum, which keeps logits small; 1e-4 in PaLM (Chowdhery et al.,
    2022, section 5)."""


CROSS_ENTROPY = LossConfig()
"""Nothing is added."""


@checked
class TrainingConfig:
    """How long to train, and what to do on the way."""

    steps: Positive = 1000
    """Optimizer steps."""
    batch_size: Positive = 32
    """B, sequences in one optimizer step."""
    accumulation: Positive = 1
    """Parts a batch is split into to save memory; gradients are those of the whole batch."""
    loss: LossConfig = CROSS_ENTROPY
    """What is added to the cross-entropy that trains."""
    average: Rate = 0.0
    """Decay of an average of the weights of all steps, which is evaluated and saved beside them; 0: no average."""
    seed: Seed = 0
    """Seed of initialisation, data order and dropout."""
    log_every: Positive = 10
    """Steps between two lines of metrics.jsonl."""
    log_norms: bool = False
    """Log the norm of each layer's gradient and update."""
    log_noise_scale: bool = False
    """Log the gradient noise scale, in rows: a batch of as many is a good one (McCandlish et al., 2018, appendix A)."""
    log_utilization: bool = False
    """Log which share of this machine's measured rate of matrix products training reaches, padding counted as work."""
    evaluate_every: Positive = 250
    """Steps between two evaluations on the held-out split; the last step is always evaluated."""
    evaluate_batches: Positive = 20
    """Batches per evaluation, always the same ones."""
    evaluate_examples: Positive = 512
    """The most held-out pairs that an evaluation decodes, for exact match and BLEU."""
    checkpoint_every: Positive = 250
    """Steps between checkpoints; a stop, the last step and the best held-out loss so far also save one."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints to keep, beside the best by held-out loss."""

    def __post_init__(self) -> None:
        require(self.steps < 2**31, f"steps is {self.steps}; expected fewer than 2^31")
        require(
            self.batch_size % self.accumulation == 0,
            f"batch_size is {self.batch_size} and accumulation is {self.accumulation}; "
            "expected a batch size that accumulation divides",
        )
        require(
            self.accumulation > 1 or not self.log_noise_scale,
            "log_noise_scale compares a batch with its parts, and accumulation is 1; expected at least 2",
        )


@checked
class SampleConfig:
    """What is sampled from the model at the end of a run."""

    count: Positive = 3
    """Samples (text) or worked examples (pairs)."""
    max_new_tokens: Positive = 200
    """Length of one text sample in tokens; does not apply to translations."""
    temperature: NotNegative = 0.8
    """Divides the logits of texts and translations; 0 is greedy."""
    top_k: Positive | None = 50
    """Draw from the k most probable tokens; None: from all."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens < 2**31, f"max_new_tokens is {self.max_new_tokens}; expected fewer than 2^31")


@checked
class DecodingConfig:
    """The settings of `generate`, by Hugging Face's names: greedy search, sampling or beam search.

    Raises FieldError for invalid values, and for values that exclude each other.
    """

    max_new_tokens: Positive = 200
    """The most new tokens of a row; it may end earlier."""
    temperature: NotNegative = 0.0
    """Divides the logits before a token is drawn; 0 takes the most probable token instead of drawing."""
    top_k: Positive | None = None
    """Draw only from the k most probable tokens (and those as probable as the k-th)."""
    top_p: AboveZero | None = None
    """Draw only from the fewest most probable tokens whose probabilities sum to p (Holtzman et al., 2020)."""
    min_p: NotNegative | None = None
    """Draw only tokens at least p times as probable as the most probable one (Nguyen et al., 2024)."""
    repetition_penalty: AboveZero = 1.0
    """Divides positive and multiplies negative scores of tokens that have occurred (Keskar et al., 2019)."""
    no_repeat_ngram_size: Count = 0
    """No n tokens in a row occur twice, the prompt of a decoder-only model included; 0: they may (Paulus et al., 2017,
    forbid trigrams)."""
    encoder_no_repeat_ngram_size: Count = 0
    """No n tokens in a row of the prompt, or of an encoder-decoder's source, are said again; 0: they may be."""
    min_new_tokens: Count = 0
    """The fewest new tokens of a row, not counting its end token."""
    suppress_tokens: TokenIds = ()
    """Tokens that are never chosen."""
    begin_suppress_tokens: TokenIds = ()
    """Tokens that are not chosen first, or not second where the first is forced."""
    bad_words_ids: Words = ()
    """Words, of one token or several in a row, that never occur; an end token alone is none."""
    forced_bos_token_id: Count | None = None
    """The first new token of every row."""
    forced_eos_token_id: Count | None = None
    """The last new token of a row that has as many as it may have."""
    renormalize_logits: bool = False
    """Make probabilities of a beam search sum to one again after penalties and constraints."""
    num_return_sequences: Positive = 1
    """Samples for each prompt; in a beam search, the n best."""
    num_beams: Positive = 1
    """Number of unfinished sequences in a beam search; 1: no beam search."""
    length_penalty: Finite = 0.6
    """Alpha: divides a finished beam's log-probability by a power of its length; 0: no penalty."""
    length_penalty_form: LengthPenaltyForm = "paper"
    """Penalty of n tokens. paper: ((5 + n) / 6)^alpha, of Wu et al. (2016), as Vaswani et al. use; power: n^alpha."""
    early_stopping: bool | Literal["never"] = False
    """True: end a beam search at num_beams finished sequences. False: when no unfinished one would be better if it
    ended at once. never: when none can become better, whatever follows."""

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        fewest = self.min_new_tokens
        require_field(most < 2**31, "max_new_tokens", f"is {most}; expected fewer than 2^31")
        require_field(fewest <= most, "min_new_tokens", f"is {fewest}; expected at most {most}, the most new tokens")
        early = self.early_stopping
        beams = self.num_beams
        wanted = self.num_return_sequences
        known = isinstance(early, bool) or early == "never"
        require_field(known, "early_stopping", f"is {early!r}; expected True, False or 'never'")
        require_field((self.top_p or 0) <= 1, "top_p", f"is {self.top_p}; expected a number above 0 and at most 1")
        require_field((self.min_p or 0) <= 1, "min_p", f"is {self.min_p}; expected a number from 0 to 1")
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            told = f"is {(forced := getattr(self, name))}, which suppress_tokens forbid; expected another token"
            require_field(forced not in self.suppress_tokens, name, told)
        if beams > 1:
            require_field(
                self.temperature == 0,
                "temperature",
                f"is {self.temperature:g}; expected 0 with a beam search, which draws nothing",
            )
            require_field(
                wanted <= beams, "num_return_sequences", f"is {wanted}; expected at most {beams}, the number of beams"
            )
        elif self.temperature == 0:
            require_field(
                wanted == 1,
                "num_return_sequences",
                f"is {wanted}; expected 1 at temperature 0, where nothing is drawn; {_DRAW}, or beams",
            )
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self, name)
            require_field(
                value is None or self.temperature > 0,
                name,
                f"is {value}; expected none at temperature 0, where nothing is drawn; leave it out, or {_DRAW}",
            )


@checked
class MeshConfig:
    """How many devices share each kind of work; their product is the number of devices in use."""

    data: Positive | None = None
    """Parts of the batch; None: as many as the remaining devices allow and the batch divides into."""
    fsdp: Positive = 1
    """Parts of the batch that also share the storage of parameters and optimizer state."""
    tensor: Positive = 1
    """Parts of every projection's heads or feed-forward width."""
    context: Positive = 1
    """Parts of the positions of every row, for rows too long for one device."""


@checked
class DistributedConfig:
    """Where several processes meet to train together. Slurm, Open MPI 4 and TPU pods need none of it."""

    coordinator: str | None = None
    """HOST:PORT of the first process, which all others must reach; None: what the launcher says, or one process."""
    processes: Positive | None = None
    """How many processes there are; None: as many as the launcher says."""
    process: int | None = None
    """The number of this one, from 0; None: what the launcher says."""
    timeout: Positive = 300
    """Seconds to wait for the others at the start."""

    def __post_init__(self) -> None:
        if self.coordinator is None:
            given = [name for name in ("processes", "process") if getattr(self, name) is not None]
            require(not given, f"{' and '.join(given)} given without coordinator; expected HOST:PORT of the first one")
            return
        host, _, port = self.coordinator.rpartition(":")
        require(
            host and port.isdecimal() and 0 < int(port) < 2**16,
            f"coordinator is {self.coordinator!r}; expected HOST:PORT, such as localhost:12345",
        )
        require(
            self.process is None or 0 <= self.process < (self.processes or self.process + 1),
            f"process is {self.process} of {self.processes}; expected a number from 0, below that of processes",
        )


@checked
class DebugConfig:
    """What helps to find a fault, and takes time."""

    nans: bool = False
    """Compute a step that failed again, one operation after the other, and name the one that made the first NaN."""


@checked
class ExperimentConfig:
    """Everything that decides the numbers of a run; saved in the run folder as config.json."""

    model: TransformerConfig
    data: TextData | MaskedTextData | PairData
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    sample: SampleConfig = SampleConfig()
    mesh: MeshConfig = MeshConfig()
    init: str | None = None
    """Hugging Face folder whose weights, architecture and tokenizer the run begins with; None: new weights."""

    def __post_init__(self) -> None:
        require(
            self.init is None or self.data.tokenizer.kind == "huggingface",
            f"init is {self.init!r} and the tokenizer is of kind {self.data.tokenizer.kind!r}; expected the "
            "checkpoint's own tokenizer: leave --data.tokenizer out",
        )
        told = {"text": "a decoder only", "masked": "an encoder only", "pairs": "both stacks"}
        kind = type(self.data)
        fits = trains_on(self.model)
        require(
            self.data.kind == fits, f"{kind.__name__} trains a model with {told[kind.kind]}; this one has {told[fits]}"
        )
        require(
            self.model.predicts_tokens,
            f"head is {self.model.head!r}; training needs a head that predicts tokens: 'linear' or 'transform'",
        )
        require(
            self.model.lora is None or not self.training.log_utilization,
            "log_utilization counts the work of training all parameters, and with adapters (lora) few train",
        )
        if isinstance(self.data, PairData):
            self._require_length(self.model.encoder, "source_length", self.data.source_length)
            self._require_length(self.model.decoder, "target_length", self.data.target_length)
            tokens = self.data.tokens_per_batch
            least = max(self.data.source_length, self.data.target_length) * self.training.batch_size
            require(
                tokens is None or (tokens >= least and self.mesh.context == 1),
                f"tokens_per_batch is {tokens}; expected at least {least}, for batch_size rows of the longest pairs, "
                "and no --mesh.context",
            )
        else:
            self._require_length(self.model.output_stack, "context_length", self.data.context_length)

    def _require_length(self, stack: object, name: str, length: int) -> None:
        rows = getattr(stack, "max_positions", None)
        parts = self.mesh.context
        require(
            length % parts == 0,
            f"{name} is {length}, which does not divide over {parts} devices (--mesh.context); "
            f"expected a multiple of {parts}",
        )
        require(
            rows is None or length <= rows,
            f"{name} is {length} and max_positions is {rows}; expected a length that the model's positions hold",
        )


def trains_on(model: TransformerConfig) -> str:
    """Returns the kind of data that a model with these stacks trains on: "text", "masked" or "pairs"."""
    return "text" if model.encoder is None else "masked" if model.decoder is None else "pairs"
