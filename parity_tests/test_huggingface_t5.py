"""What T5 and Marian alone have: activations in one word, ties that only the arrays tell, positions in the file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jax_tformer.config import Activation, DropoutConfig
from jax_tformer.config.errors import InputError
from jax_tformer.hub.families import config_from_huggingface, from_huggingface, to_huggingface
from jax_tformer.hub.names import WeightsError
from parity.gates.measure import Measured, compared
from parity_tests.huggingface import Oracle
from parity_tests.test_decoding import model_of
from parity_tests.test_huggingface_weights import bytes_lost
from torch_ref import reference
from torch_ref.layers import inject
from twin.cases import VOCABULARY
from twin.dropout import dropout_sites

T5 = {"architectures": ["T5ForConditionalGeneration"]}
MARIAN = {"architectures": ["MarianMTModel"]}


@pytest.mark.parametrize(
    ("fields", "activation", "gated"),
    [
        ({}, "relu", False),
        ({"feed_forward_proj": "gelu"}, "gelu_erf", False),
        ({"feed_forward_proj": "gated-gelu"}, "gelu_tanh", True),
        ({"feed_forward_proj": "gated-silu"}, "silu", True),
        # What newer versions save beside it is what they compute.
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu", "is_gated_act": True}, "gelu_erf", True),
    ],
)
def test_the_activation_of_a_t5(fields: dict[str, Any], activation: Activation, gated: bool) -> None:
    stack = config_from_huggingface(T5 | fields).encoder
    assert stack is not None
    assert (stack.activation, stack.gated) == (activation, gated)


def test_the_rate_of_a_t5_is_of_all_that_it_drops() -> None:
    assert config_from_huggingface(T5 | {"dropout_rate": 0.3}).dropout == DropoutConfig(0.3, 0.3, 0.3, 0.3, 0.3)


@pytest.mark.parametrize(("tie", "scale"), [(False, None), (True, False), (True, True)])
def test_the_arrays_of_a_t5_tell_whether_its_head_is_tied(tie: bool, scale: bool | None) -> None:
    """Older versions save whether it is, and newer ones always that it is."""
    oracle = Oracle("t5 1.1")
    fields = {"tie_word_embeddings": tie, "scale_decoder_outputs": scale}
    weights = oracle.random_weights(0.02, 0)
    config, ours = from_huggingface(oracle.json | fields, weights)
    assert not config.tied_head
    assert config.head_scale == bool(scale)
    np.testing.assert_array_equal(ours["head.weight"], weights["lm_head.weight"])

    table = weights["shared.weight"]
    copies = {"encoder.embed_tokens.weight": table, "decoder.embed_tokens.weight": table, "lm_head.weight": table}
    tied, ours = from_huggingface(oracle.json | fields, weights | copies)
    assert tied.tied_head
    assert "head.weight" not in ours


def test_positions_in_the_file_of_a_marian() -> None:
    oracle = Oracle("marian")
    weights = oracle.random_weights(0.02, 0)
    names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    stored = {name: oracle.model.get_parameter(name).detach().numpy() for name in names}
    without = from_huggingface(oracle.json, weights)[1]
    for dtype in (np.float64, np.float32, np.float16):
        kept = {name: table.astype(dtype) for name, table in stored.items()}
        assert bytes_lost(from_huggingface(oracle.json, weights | kept)[1], without).passed
    table = stored[names[1]]
    interleaved = np.stack(np.split(table, 2, axis=1), axis=-1).reshape(table.shape)
    for wrong in (interleaved, table[1:], np.roll(table, 2, axis=0), table * np.nan):
        with pytest.raises(WeightsError, match=r"model\.decoder\.embed_positions\.weight is not the table of sines"):
            from_huggingface(oracle.json, weights | {names[1]: wrong})


@pytest.mark.parametrize(
    ("tie", "share", "tied", "shared"),
    [(True, True, True, True), (True, False, True, False), (False, True, False, False), (False, False, False, False)],
)
def test_the_tables_of_a_marian(tie: bool, share: bool, tied: bool, shared: bool) -> None:
    oracle = Oracle("marian", tie_word_embeddings=tie, share_encoder_decoder_embeddings=share)
    assert (oracle.config.tied_head, oracle.config.shared_embedding) == (tied, shared)
    raw = oracle.random_weights(0.2, 0)
    arrays = to_huggingface("MarianMTModel", *from_huggingface(oracle.json, raw))[1]
    # Untied, their file may have a third table, and ours has one; nothing uses it.
    unused = set() if tie else {"model.shared.weight"}
    assert raw.keys() - unused == arrays.keys() - unused
    assert unused <= arrays.keys()
    assert bytes_lost(*({name: side[name] for name in side.keys() - unused} for side in (arrays, raw))).passed


@contextmanager
def told_masks(masks: list[Tensor]) -> Iterator[None]:
    """While this is on, torch drops by these masks, one after another."""

    def dropout(x: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        mask = masks.pop(0)
        assert mask.shape == x.shape
        return x * mask / (1 - p)

    with patch.object(functional, "dropout", dropout):
        yield


@pytest.mark.parametrize(
    ("name", "rates"), [("t5", ["dropout_rate"]), ("marian", ["dropout", "attention_dropout", "activation_dropout"])]
)
def test_they_drop_where_we_do(name: str, rates: list[str], record: Callable[[str, Measured], None]) -> None:
    """Logits of training agree, where theirs takes our masks in their order: as many, and of the same shapes."""
    rate = 0.375
    oracle = Oracle(name, **dict.fromkeys(rates, rate))
    ours = reference(oracle.config.with_dtype("float64")).eval()
    raw, batch = oracle.random_weights(0.2, 0), oracle.batch("none", 0)
    oracle.load(raw)
    ours.load_state_dict({key: torch.from_numpy(x) for key, x in from_huggingface(oracle.json, raw)[1].items()})
    rng, sites = np.random.default_rng(0), dropout_sites(oracle.config, batch)
    masks = {site: torch.from_numpy(rng.random(shape) > rate) for site, (own, shape) in sites.items() if own > 0}
    inject(ours, masks)
    left, ids = list(masks.values()), [torch.from_numpy(batch[side]) for side in ("source", "target")]
    oracle.model.train()
    with torch.no_grad():
        with oracle.whole(), told_masks(left):
            theirs = oracle.model(input_ids=ids[0], decoder_input_ids=ids[1]).logits
        logits = ours(*ids).logits
    assert not left
    record(f"huggingface {name}", compared("7 dropout", {"logits": logits.numpy()}, {"logits": theirs.numpy()}))


@pytest.mark.deep
def test_positions_beyond_500(record: Callable[[str, Measured], None]) -> None:
    """With the usual buckets: far beyond the largest distance, over several blocks of queries."""
    oracle = Oracle("t5", relative_attention_num_buckets=32, relative_attention_max_distance=128)
    raw = oracle.random_weights(0.2, 0)
    oracle.load(raw)
    net, params = model_of(oracle.config, from_huggingface(oracle.json, raw)[1])
    source, target = (np.random.default_rng(seed).integers(0, VOCABULARY, (2, 600)) for seed in (0, 1))
    with torch.no_grad(), oracle.whole():
        ids = {"input_ids": torch.from_numpy(source), "decoder_input_ids": torch.from_numpy(target)}
        theirs = oracle.model(**ids).logits.numpy()
    ours = np.asarray(jax.jit(net.apply)(params, jnp.asarray(source), jnp.asarray(target)))
    record("huggingface t5", compared("1 activations", {"logits": ours}, {"logits": theirs}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (T5 | {"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj is 'gated-gelu-new'"),
        (T5 | {"feed_forward_proj": "tanh"}, "dense_act_fn is 'tanh'"),
        (T5 | {"is_encoder_decoder": False}, "only True is supported"),
        (T5 | {"relative_attention_num_buckets": 7}, "relative_attention_num_buckets is 7"),
        (T5 | {"relative_attention_max_distance": 8}, "relative_attention_max_distance is 8"),
        (T5 | {"dropout_rate": 1.0}, "from 0 to below 1"),
        (MARIAN | {"decoder_vocab_size": 9}, "decoder_vocab_size is 9 in the Hugging Face config and vocab_size is"),
        (MARIAN | {"static_position_embeddings": False}, "only True is supported"),
        (MARIAN | {"normalize_before": True}, "only False is supported"),
        (MARIAN | {"decoder_layerdrop": 0.1}, r"only 0\.0 is supported"),
        (MARIAN | {"share_encoder_decoder_embeddings": "no"}, "share_encoder_decoder_embeddings|shared_embedding"),
        (MARIAN | {"activation_function": "tanh"}, "activation_function is 'tanh'"),
    ],
)
def test_settings_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        config_from_huggingface(fields)
    assert "\n" not in str(error.value)
