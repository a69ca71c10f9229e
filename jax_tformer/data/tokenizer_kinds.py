"""Makes the tokenizers of each kind: bytes, characters, BPE trained on a corpus, or one of Hugging Face."""

from collections.abc import Iterable, Mapping

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jax_tformer.data.tokenizers import BYTES, ONE_CHARACTER, Role, Tokenizer, load_tokenizer
from jax_tformer.errors import InputError
from jax_tformer.experiment import TokenizerConfig
from jax_tformer.files import user_path

_HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str], special: Mapping[Role, str]) -> Tokenizer:
    """A tokenizer of the kind that `config` names, for `texts`.

    `special` is the token to make for each role; two roles may share one. Special tokens get the highest ids. A Hugging
    Face tokenizer brings its own special tokens, and `special` has no say there.

    Raises InputError if `texts` are empty where they matter, or the Hugging Face tokenizer cannot be had.
    """
    if config.kind == "huggingface":
        return _load_huggingface(config.name, config.revision)
    tokens = list(dict.fromkeys(special.values()))
    if config.kind == "bytes":
        backend = _byte_level(
            models.BPE({character: byte for byte, character in enumerate(BYTES)}, []), use_regex=False
        )
    elif config.kind == "characters":
        backend = _characters(texts)
    else:
        assert config.vocab_size is not None  # checked on construction
        backend = _trained_bpe(texts, config.vocab_size - len(tokens))
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in tokens])
    return Tokenizer(backend, special)


def _byte_level(model: models.BPE, use_regex: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _characters(texts: Iterable[str]) -> tokenizers.Tokenizer:
    found: set[str] = set()
    for text in texts:
        found.update(text)
    characters = sorted(found)
    if not characters:
        raise InputError("the text is empty; expected text to take the tokenizer's characters from")
    backend = tokenizers.Tokenizer(models.WordLevel({character: id for id, character in enumerate(characters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(ONE_CHARACTER), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _trained_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    backend = _byte_level(models.BPE(), use_regex=True)
    # All 256 bytes are in the alphabet, so that text unlike the corpus can be encoded too.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _load_huggingface(name: str | None, revision: str | None) -> Tokenizer:
    if name is None:
        raise InputError(
            "tokenizer kind is 'huggingface' without a name; give --data.tokenizer.name a folder or a hub name"
        )
    if user_path(name).is_dir():
        if revision is not None:
            raise InputError(f"the tokenizer {name!r} is a folder, which has no revision; leave it out")
        return load_tokenizer(user_path(name))
    # The hub's roles stand in files that Tokenizer.from_pretrained does not fetch.
    from huggingface_hub import model_info, snapshot_download

    try:
        if revision is None:
            newest = model_info(name).sha
        else:
            folder = snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES)
    except Exception as error:  # network, proxy, hub and name errors share no base class
        raise InputError(
            f"the tokenizer {name!r} is no folder here and the Hugging Face hub did not give it "
            f"({type(error).__name__}); expected a folder with tokenizer.json, or a hub name and a network"
        ) from error
    if revision is None:
        raise InputError(
            f"the tokenizer {name!r} comes from the hub, where it may change; expected the commit to use; "
            f"the newest is --data.tokenizer.revision {newest}"
        )
    return load_tokenizer(folder)
