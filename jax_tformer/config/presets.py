"""Named architectures and experiments: data, not code."""

from dataclasses import replace
from typing import NamedTuple

from jax_tformer.config import ComputeConfig, DropoutConfig, RotaryConfig, StackConfig, TransformerConfig
from jax_tformer.config.experiment import (
    ExperimentConfig,
    LossConfig,
    MaskedTextData,
    OptimizerConfig,
    PairData,
    RatesConfig,
    SampleConfig,
    TextData,
    TokenizerConfig,
    TrainingConfig,
)

_GPT2_VOCABULARY = 50257
_BERT_VOCABULARY = 30522
_WMT_VOCABULARY = 37000
_DROPOUT = DropoutConfig(embedding=0.1, residual=0.1)
_MORE_DROPOUT = DropoutConfig(embedding=0.3, residual=0.3)
# Queries, keys and values are products alone.
_UNBIASED = StackConfig(query_bias=False, key_bias=False, value_bias=False)
NO_BIASES = replace(_UNBIASED, output_bias=False, feedforward_bias=False, norm_bias=False)

# What stands nowhere here is as in the paper: the defaults of our config are 6 layers, 8 heads, 512 and 2048 wide.

# "Transformers from Scratch" (the article): d_model 6, 2 heads, hidden 12, one layer, dropout 0.1, GPT-2 tokens.
_ARTICLE_STACK = StackConfig(num_layers=1, num_heads=2, feedforward_width=12)
_ARTICLE = TransformerConfig(
    vocab_size=_GPT2_VOCABULARY,
    d_model=6,
    encoder=_ARTICLE_STACK,
    decoder=_ARTICLE_STACK,
    head_bias=True,
    initializer="xavier_uniform",
    dropout=DropoutConfig(residual=0.1, feedforward=0.1),
)

# The lecture gives neither width nor depth, and follows the paper "religiously". Its toy vocabulary has 10 ids.
_LECTURE_STACK = replace(_UNBIASED, positions="learned", max_positions=100)

# The paper's projections have no bias; its first implementation uses eps 1e-6.
_VASWANI_STACK = replace(_UNBIASED, output_bias=False, norm_eps=1e-6, embedding_scale=True)
_VASWANI_BASE = TransformerConfig(
    vocab_size=_WMT_VOCABULARY,
    encoder=_VASWANI_STACK,
    decoder=_VASWANI_STACK,
    shared_embedding=True,
    tied_head=True,
    initializer="xavier_uniform",
    dropout=_DROPOUT,
)
_VASWANI_BIG_STACK = replace(_VASWANI_STACK, num_heads=16, feedforward_width=4096)

_GPT2_STACK = StackConfig(
    num_layers=12,
    num_heads=12,
    feedforward_width=3072,
    activation="gelu_tanh",
    norm_placement="pre",
    final_norm=True,
    positions="learned",
    max_positions=1024,
)
_GPT2 = TransformerConfig(
    vocab_size=_GPT2_VOCABULARY,
    d_model=768,
    decoder=_GPT2_STACK,
    tied_head=True,
    residual_init_scale=True,
    dropout=replace(_DROPOUT, attention=0.1),
)

_BERT_STACK = StackConfig(
    num_layers=12,
    num_heads=12,
    feedforward_width=3072,
    activation="gelu_erf",
    norm_eps=1e-12,
    embedding_norm=True,
    positions="learned",
    max_positions=512,
    token_types=2,
)

ARCHITECTURES: dict[str, TransformerConfig] = {
    # Source 000, complete.
    "article-encoder-decoder": _ARTICLE,
    # Source 001, an earlier draft: the result is the encoder's output.
    "article-encoder": replace(_ARTICLE, decoder=None, head="none", head_bias=False),
    # Source 002: 6 tokens of width 4, 2 heads of width 2. It gives no vocabulary, depth or kind of positions.
    "post-decoder-only": TransformerConfig(
        vocab_size=256,
        d_model=4,
        decoder=replace(
            _UNBIASED,
            num_layers=2,
            num_heads=2,
            feedforward_width=16,
            norm_placement="pre",
            final_norm=True,
            positions="learned",
            max_positions=6,
        ),
        head_bias=True,
    ),
    # Source 003: one BERT-style block on embedded input, without positions and head.
    "notebook-bert": TransformerConfig(
        vocab_size=_BERT_VOCABULARY,
        d_model=768,
        encoder=replace(
            _UNBIASED,
            num_layers=1,
            num_heads=12,
            feedforward_width=4 * 768,
            activation="gelu_erf",
            positions="none",
        ),
        head="none",
        dropout=DropoutConfig(attention=0.1, residual=0.5),
    ),
    # Source 004.
    "lecture-seq2seq": TransformerConfig(
        vocab_size=10,
        encoder=_LECTURE_STACK,
        decoder=_LECTURE_STACK,
        head_bias=True,
        initializer="xavier_uniform",
        dropout=_DROPOUT,
    ),
    # "Attention is all you need", table 3: 65 and 213 million parameters.
    "vaswani-base": _VASWANI_BASE,
    "vaswani-big": replace(
        _VASWANI_BASE,
        d_model=1024,
        encoder=_VASWANI_BIG_STACK,
        decoder=_VASWANI_BIG_STACK,
        dropout=_MORE_DROPOUT,
    ),
    # Radford et al. (2019), the smallest: 124,439,808 parameters.
    "gpt2": _GPT2,
    # Devlin et al. (2018) with its masked-language-model head: 109,514,298 parameters.
    "bert-base": TransformerConfig(
        vocab_size=_BERT_VOCABULARY,
        d_model=768,
        encoder=_BERT_STACK,
        head="transform",
        tied_head=True,
        head_bias=True,
        dropout=replace(_DROPOUT, attention=0.1),
    ),
}


class Experiment(NamedTuple):
    """A named experiment: a line for `--help`, and a config that flags can change."""

    description: str
    config: ExperimentConfig


_SMALL_STACK = replace(_GPT2_STACK, num_layers=4, num_heads=4, feedforward_width=512)
_SMALL_GPT = TransformerConfig(
    d_model=128,
    decoder=replace(_SMALL_STACK, positions="rotary", max_positions=None),
    tied_head=True,
    residual_init_scale=True,
)
_TEXT_DATA = TextData(tokenizer=TokenizerConfig("bpe", vocab_size=1024))
_TEXT = ExperimentConfig(
    model=_SMALL_GPT,
    data=_TEXT_DATA,
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
    training=TrainingConfig(steps=800, batch_size=8, evaluate_every=200, checkpoint_every=200),
)
_DATES_STACK = StackConfig(
    num_layers=2, num_heads=4, feedforward_width=192, norm_placement="pre", final_norm=True, embedding_scale=True
)
_DATES_MODEL = TransformerConfig(
    d_model=96,
    encoder=_DATES_STACK,
    decoder=_DATES_STACK,
    tied_head=True,
    shared_embedding=True,
    initializer="xavier_uniform",
    compute=ComputeConfig(unroll=2),
)
_GREEDY = SampleConfig(count=8, temperature=0.0)
_SCAN_STACK = replace(_DATES_STACK, num_heads=8, feedforward_width=256)
_PAIRS_STACK = replace(_DATES_STACK, num_layers=3, feedforward_width=1024)

_MASKED_DATA = MaskedTextData(source="python-docs", tokenizer=TokenizerConfig("bpe", vocab_size=1024))
_MASKED_DOCS = ExperimentConfig(
    model=TransformerConfig(
        d_model=128,
        encoder=replace(
            _BERT_STACK, num_layers=4, num_heads=4, feedforward_width=512, max_positions=128, token_types=0
        ),
        head="transform",
        tied_head=True,
        head_bias=True,
    ),
    data=_MASKED_DATA,
    optimizer=OptimizerConfig(weight_decay=0.01),
    training=TrainingConfig(steps=800, batch_size=16, evaluate_every=200, checkpoint_every=200),
)
_NARROW = ComputeConfig(dtype="bfloat16")
_GPT2_DATA = TextData(
    context_length=1024,
    stride=1024,
    tokenizer=TokenizerConfig(
        "huggingface", name="openai-community/gpt2", revision="607a30d783dfa663caf39e06633721c8d4cfcd7e"
    ),
)
_WMT_DATA = PairData(
    source_length=256,
    target_length=256,
    held_out=0.0007,
    tokens_per_batch=25_000,
    tokenizer=TokenizerConfig("bpe", vocab_size=_WMT_VOCABULARY),
)
_WMT = ExperimentConfig(
    model=replace(_VASWANI_BASE, vocab_size=None),
    data=_WMT_DATA,
    optimizer=OptimizerConfig(
        learning_rate=(512 * 4000) ** -0.5,
        schedule="inverse_sqrt",
        warmup_steps=4000,
        beta2=0.98,
        eps=1e-9,
        weight_decay=0.0,
        clip_norm=None,
    ),
    training=TrainingConfig(
        steps=100_000,
        batch_size=8,
        loss=LossConfig(label_smoothing=0.1),
        evaluate_every=1500,
        checkpoint_every=1500,
        keep_checkpoints=5,
    ),
    sample=_GREEDY,
)
_IWSLT_STACK = replace(_VASWANI_STACK, num_heads=4, feedforward_width=1024)
EXPERIMENTS: dict[str, Experiment] = {
    "python-docs": Experiment(
        "decoder-only on the Python language reference that ships inside CPython",
        replace(_TEXT, data=replace(_TEXT_DATA, source="python-docs")),
    ),
    "dates": Experiment(
        "encoder-decoder: dates in many locales and styles -> ISO 8601",
        ExperimentConfig(
            model=_DATES_MODEL,
            # The longest date of all locales has 44 tokens, and an ISO date 11, both with the end token.
            data=PairData(source="dates", source_length=44, target_length=11),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=200, weight_decay=0.01),
            training=TrainingConfig(steps=1500, batch_size=64, evaluate_every=500, checkpoint_every=500),
            sample=SampleConfig(count=12, temperature=0.0),
        ),
    ),
    "scan": Experiment(
        "encoder-decoder: SCAN, commands -> actions; --data.source scan-length or scan-jump for its other splits",
        ExperimentConfig(
            model=replace(
                _DATES_MODEL,
                d_model=128,
                encoder=_SCAN_STACK,
                decoder=_SCAN_STACK,
                dropout=_DROPOUT,
            ),
            data=PairData(
                source="scan-simple",
                source_length=10,
                target_length=49,
                held_out=0.2,
                tokens_per_batch=2048,
                tokenizer=TokenizerConfig("words"),
            ),
            optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=200, weight_decay=0.01),
            training=TrainingConfig(
                steps=2500, batch_size=8, evaluate_every=1250, evaluate_examples=20910, checkpoint_every=1250
            ),
            sample=_GREEDY,
        ),
    ),
    "grokking": Experiment(
        "decoder-only: addition modulo 97, learnt by heart first and understood much later",
        ExperimentConfig(
            model=TransformerConfig(
                d_model=128, decoder=replace(_SMALL_STACK, num_layers=1, activation="relu", max_positions=4)
            ),
            data=TextData(
                source="modular-addition", context_length=4, held_out=0.75, tokenizer=TokenizerConfig("words")
            ),
            optimizer=OptimizerConfig(
                schedule="warmup_stable_decay",
                warmup_steps=10,
                final_fraction=0.0,
                beta2=0.98,
                weight_decay=1.0,
            ),
            training=TrainingConfig(
                steps=5000, batch_size=512, evaluate_every=100, checkpoint_every=2000, log_every=100
            ),
            sample=SampleConfig(count=8, max_new_tokens=1, temperature=0.0),
        ),
    ),
    "masked-chain": Experiment(
        "encoder-only: restore masked letters of a Markov chain, whose least possible loss is known",
        replace(
            _MASKED_DOCS,
            model=replace(
                _MASKED_DOCS.model,
                d_model=64,
                encoder=replace(
                    _SMALL_STACK, num_layers=2, feedforward_width=256, positions="relative", max_positions=None
                ),
            ),
            data=replace(
                _MASKED_DATA, source="markov-chain", context_length=64, tokenizer=TokenizerConfig("characters")
            ),
            optimizer=replace(_MASKED_DOCS.optimizer, name="muon", learning_rate=1e-2, final_fraction=0.0),
            training=TrainingConfig(steps=3000, batch_size=64, evaluate_every=500, checkpoint_every=1500),
        ),
    ),
    "masked-docs": Experiment("encoder-only: restore masked tokens of the Python language reference", _MASKED_DOCS),
    "masked": Experiment(
        "encoder-only, restores masked tokens of your own text: --data.path FILE, FOLDER or 'GLOB'",
        replace(_MASKED_DOCS, data=replace(_MASKED_DATA, source="files")),
    ),
    "text": Experiment("decoder-only on your own text: --data.path FILE, FOLDER or 'GLOB'", _TEXT),
    "pairs": Experiment(
        "encoder-decoder on your own pairs: --data.path FILE.tsv, FILE.jsonl, or with --data.target-path",
        ExperimentConfig(
            model=replace(
                _DATES_MODEL,
                d_model=256,
                encoder=_PAIRS_STACK,
                decoder=_PAIRS_STACK,
                dropout=_DROPOUT,
                compute=ComputeConfig(),
            ),
            data=PairData(tokenizer=TokenizerConfig("bpe", vocab_size=4096)),
            optimizer=OptimizerConfig(schedule="inverse_sqrt", warmup_steps=400, beta2=0.98),
            training=TrainingConfig(steps=5000, loss=LossConfig(label_smoothing=0.1)),
            sample=_GREEDY,
        ),
    ),
    # llm.c's scripts/run_gpt2_124M.sh: 524,288 tokens a step, no dropout.
    "gpt2-124m": Experiment(
        "decoder-only: GPT-2 124M as llm.c trains it; --data.path its shards of FineWeb",
        ExperimentConfig(
            model=replace(_GPT2, vocab_size=None, dropout=DropoutConfig(), compute=_NARROW),
            data=_GPT2_DATA,
            optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700, final_fraction=0.0, beta2=0.95),
            training=TrainingConfig(steps=18865, batch_size=512, accumulation=8),
        ),
    ),
    # records/track_3_optimization/train_gpt_simple.py of modded-nanogpt. Its last projections start at 0, its Muon has
    # other coefficients and half our step for the feed-forward's last matrix, and its AdamW decays less.
    "modded-nanogpt": Experiment(
        "decoder-only: the model of modded-nanogpt's third track, by Muon; --data.path llm.c's shards of FineWeb",
        ExperimentConfig(
            model=TransformerConfig(
                vocab_size=50304,
                d_model=768,
                decoder=StackConfig(
                    num_layers=12,
                    num_heads=6,
                    feedforward_width=3072,
                    attention_scale=0.12**-2,
                    query_key_norm=True,
                    query_key_scale=False,
                    activation="relu_squared",
                    norm="rmsnorm",
                    norm_placement="pre",
                    norm_eps=2**-23,
                    norm_bias=False,
                    final_norm=True,
                    embedding_norm=True,
                    positions="rotary",
                    # 1024^(i / 31) where ours is base^(i / 32); half of the columns turn.
                    position_base=1024 ** (32 / 31),
                    rotary=RotaryConfig(width=64),
                ),
                head_bias=True,
                logit_cap=15.0,
                logit_cap_form="root",
                compute=_NARROW,
            ),
            data=_GPT2_DATA,
            optimizer=OptimizerConfig(
                name="muon",
                # Theirs is 0.025 for a step whose root mean square is 0.2 sqrt(768) times smaller.
                learning_rate=0.0045,
                rates=RatesConfig(tables=3.0, head=0.9, vectors=3.3),
                schedule="warmup_stable_decay",
                warmup_steps=0,
                decay_share=0.7,
                final_fraction=0.0,
                beta1=0.8,
                beta2=0.95,
                eps=1e-10,
                weight_decay=0.28,
                clip_norm=None,
            ),
            training=TrainingConfig(steps=3250, batch_size=512, accumulation=8, evaluate_every=125),
        ),
    ),
    # "Attention is all you need", sections 5 and 6.1: generate.py with --checkpoint last-5 --beam 4.
    "wmt14-en-de": Experiment(
        "encoder-decoder: the paper's base model; --data.path and --data.target-path WMT14 English-German", _WMT
    ),
    # fairseq's transformer_iwslt_de_en.
    "iwslt14-de-en": Experiment(
        "encoder-decoder: fairseq's model; --data.path and --data.target-path IWSLT14 German-English",
        replace(
            _WMT,
            model=replace(
                _WMT.model,
                encoder=_IWSLT_STACK,
                decoder=_IWSLT_STACK,
                dropout=_MORE_DROPOUT,
            ),
            data=replace(
                _WMT_DATA, held_out=0.045, tokens_per_batch=4096, tokenizer=TokenizerConfig("bpe", vocab_size=10_000)
            ),
            optimizer=replace(_WMT.optimizer, learning_rate=5e-4, eps=1e-8, weight_decay=1e-4),
            training=replace(_WMT.training, steps=50_000),
        ),
    ),
    # The CPU recipe of nanoGPT's README. Its windows start anywhere, hence stride 1. The learning rate is ours; with
    # nanoGPT's 1e-3 the held-out loss ends at 1.89.
    "shakespeare-char": Experiment(
        "decoder-only by nanoGPT's published CPU recipe: --data.path tinyshakespeare.txt",
        ExperimentConfig(
            model=replace(
                _SMALL_GPT,
                decoder=replace(
                    _SMALL_STACK,
                    activation="gelu_erf",
                    max_positions=64,
                    query_bias=False,
                    key_bias=False,
                    value_bias=False,
                    output_bias=False,
                    feedforward_bias=False,
                    norm_bias=False,
                ),
            ),
            data=TextData(context_length=64, tokenizer=TokenizerConfig("characters")),
            optimizer=OptimizerConfig(learning_rate=2e-3),
            training=TrainingConfig(steps=2000, batch_size=12, seed=1337),
            sample=SampleConfig(max_new_tokens=500, top_k=200),
        ),
    ),
}
DEFAULT_EXPERIMENT = "python-docs"
