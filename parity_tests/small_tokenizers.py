"""Small tokenizers of the kinds that checkpoints have, saved by `transformers`: what they add, and how they split."""

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CORPUS = [
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "To be, or not to be: that is the question. Whether 'tis nobler in the mind, 1603!",
]
TEXTS = ["It was a bright day", " To be,  or not\nto be", "the 1603 mind!", "user: that is", "naïve Ünïcode 的"]
NAMED = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<|user|>", "<|assistant|>", "<|end|>"]
TRAINED = {"special_tokens": SPECIAL, "show_progress": False}


def byte_level(adds="nothing", **settings):
    """GPT-2's kind: BPE of bytes. `adds` says what stands around a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **TRAINED)
    return _trained(backend, trainer, adds, settings)


def word_pieces(**settings):
    """BERT's kind."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, **TRAINED)
    return _trained(backend, trainer, "around", {"cls_token": "<s>", "sep_token": "</s>", **settings})


def sentence_pieces(adds="after", **settings):
    """Llama's and T5's kind: spaces are part of tokens, and the first one is added."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **TRAINED)
    return _trained(backend, trainer, adds, settings)


def saved(tokenizer, folder):
    """Saves a tokenizer, and returns what `AutoTokenizer` makes of the folder."""
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def _trained(backend, trainer, adds, settings):
    backend.train_from_iterator(CORPUS * 20, trainer)
    if template := {"after": "$A </s>", "around": "<s> $A </s>", "before": "<s> $A"}.get(adds):
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
        )
    named = {"additional_special_tokens": SPECIAL[5:], **NAMED, **settings}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)
