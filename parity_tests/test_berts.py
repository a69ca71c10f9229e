"""What is special in BERT, RoBERTa and DistilBERT: poolers, labels, the places of dropout, positions, full size."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from transformers.models.bert import BertConfig, BertForMaskedLM

from jax_tformer import load_pretrained, save_pretrained
from jax_tformer.config import DropoutConfig
from jax_tformer.config.errors import InputError
from jax_tformer.functional import transformer
from jax_tformer.hub.families import config_from_huggingface, from_huggingface, to_huggingface
from jax_tformer.hub.names import from_reference, to_reference
from parity.gates.measure import FLOAT32, Measured, compared, relative_error
from parity_tests.huggingface import Oracle, config_json
from parity_tests.oracles import ENTRIES
from torch_ref import reference
from torch_ref.layers import inject
from twin.cases import weights_for
from twin.dropout import dropout_sites

Record = Callable[[str, Measured], None]
TOKENS = np.arange(2, 2 + 2 * 7).reshape(2, 7)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert texts", 109_483_778),
        ("bert tokens", 108_893_186),
        ("roberta", 124_644_864),
        ("roberta masked", 124_696_665),
        ("roberta texts", 124_646_402),
        ("roberta tokens", 124_055_810),
        ("distilbert", 66_362_880),
        ("distilbert masked", 66_985_530),
        ("distilbert texts", 66_955_010),
        ("distilbert tokens", 66_364_418),
    ],
)
def test_absent_settings_are_their_defaults(name: str, count: int) -> None:
    """`count` parameters, theirs and ours."""
    kind = ENTRIES[name].kind
    with torch.device("meta"):
        model = kind(kind.config_class())
    assert sum(p.numel() for p in model.parameters()) == count
    ours = config_from_huggingface(config_json(model))
    assert sum(leaf.size for leaf in jax.tree.leaves(transformer(ours).shapes)) == count
    assert config_from_huggingface({"architectures": [kind.__name__]}) == ours


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_model_without_its_pooler(name: str, tmp_path: Path) -> None:
    """config.json does not tell of it, the arrays do; there and back bit for bit, and transformers opens it."""
    kind = ENTRIES[name].kind
    theirs = kind(kind.config_class(**ENTRIES[name].settings), add_pooling_layer=False).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    net, params, _ = load_pretrained(tmp_path / "theirs")
    assert net.config.pooler == "none"
    assert "pooler" not in params
    save_pretrained(tmp_path / "ours", net, params, None)
    ours, stored = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert {key: array.tobytes() for key, array in ours.items()} == {k: array.tobytes() for k, array in stored.items()}
    opened, told = kind.from_pretrained(tmp_path / "ours", add_pooling_layer=False, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        same = opened.eval()(torch.from_numpy(TOKENS))[0], theirs(torch.from_numpy(TOKENS))[0]
    assert torch.equal(*same)
    # One with its pooler is another config, and is written as such.
    pooled = Oracle(name)
    assert pooled.config.pooler == "tanh"
    assert "pooler.dense.weight" in to_huggingface(kind.__name__, pooled.config, weights_for(pooled.config, 0.02))[1]


def test_names_of_classes_survive(tmp_path: Path) -> None:
    """They change no number, so that they are no part of our config; a change of another setting leaves them be."""
    oracle = Oracle("bert texts", id2label={0: "no", 1: "maybe", 2: "yes"}, problem_type="multi_label_classification")
    oracle.model.save_pretrained(tmp_path / "theirs")
    net, params, _ = load_pretrained(tmp_path / "theirs")
    assert net.config.classes == 3
    save_pretrained(tmp_path / "ours", net, params, None)
    ours, theirs = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("ours", "theirs"))
    assert ours == theirs
    assert ours["id2label"] == {"0": "no", "1": "maybe", "2": "yes"}
    assert ours["problem_type"] == "multi_label_classification"

    other = transformer(replace(net.config, dropout=replace(net.config.dropout, attention=0.3)))
    other.origin = net.origin
    save_pretrained(tmp_path / "changed", other, params, None)
    changed = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert changed == theirs | {"attention_probs_dropout_prob": 0.3, "position_embedding_type": "absolute"}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("bert texts", {}, DropoutConfig(0.1, 0.1, 0.1, classifier=0.1)),
        ("bert texts", {"hidden_dropout_prob": 0.3}, DropoutConfig(0.3, 0.1, 0.3, classifier=0.3)),
        ("bert tokens", {"classifier_dropout": 0.0}, DropoutConfig(0.1, 0.1, 0.1)),
        ("roberta texts", {"classifier_dropout": 0.3}, DropoutConfig(0.1, 0.1, 0.1, pooler=0.3, classifier=0.3)),
        ("roberta tokens", {"hidden_dropout_prob": 0.3}, DropoutConfig(0.3, 0.1, 0.3, classifier=0.3)),
        ("distilbert texts", {"dropout": 0.3}, DropoutConfig(0.3, 0.1, 0.3, attention_output=0.0, classifier=0.2)),
        (
            "distilbert texts",
            {"seq_classif_dropout": 0.5},
            DropoutConfig(0.1, 0.1, 0.1, attention_output=0.0, classifier=0.5),
        ),
        ("distilbert tokens", {"dropout": 0.3}, DropoutConfig(0.3, 0.1, 0.3, attention_output=0.0, classifier=0.3)),
    ],
)
def test_rates_of_dropout(name: str, settings: dict[str, Any], expected: DropoutConfig) -> None:
    assert Oracle(name, **settings).config.dropout == expected


@contextmanager
def told_masks(masks: list[Tensor], rate: float) -> Iterator[None]:
    """While this is on, torch's dropout layers with this rate use these masks, one after another."""
    right = torch.nn.Dropout.forward

    def forward(self: torch.nn.Dropout, x: Tensor) -> Tensor:
        if self.p != rate:
            return right(self, x)
        mask = masks.pop(0)
        assert mask.shape == x.shape
        return x * mask / (1 - rate)

    with patch.object(torch.nn.Dropout, "forward", forward):
        yield


@pytest.mark.parametrize("name", [pytest.param("roberta tokens", marks=pytest.mark.deep), "distilbert texts"])
def test_a_net_of_our_own_is_written(name: str, tmp_path: Path) -> None:
    """Dropout that the class does not have is left out: it changes nothing of what the model computes."""
    config = replace(Oracle(name).config, dropout=DropoutConfig(residual=0.2, feedforward=0.3))
    net = transformer(config)
    params = net.init(jax.random.key(0))
    save_pretrained(tmp_path, net, params, None)
    theirs = ENTRIES[name].auto.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    ours = np.asarray(jax.jit(net.apply)(params, jnp.asarray(TOKENS)))
    assert relative_error(ours, logits) < 1e-5


@pytest.mark.parametrize("kind", ["texts", "tokens"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_they_drop_where_we_do(family: str, kind: str, record: Record) -> None:
    """Logits of training agree, where theirs takes our masks in their order: as many, and of the same shapes."""
    name, rate, ids = f"{family} {kind}", 0.375, torch.from_numpy(TOKENS)
    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": 0.0}
    if family == "distilbert":
        rates = {"dropout": rate, "attention_dropout": 0.0, "seq_classif_dropout": rate}
    oracle = Oracle(name, **rates)
    raw = oracle.random_weights(0.2, 0)
    oracle.load(raw)
    ours = reference(oracle.config.with_dtype("float64")).eval()
    ours.load_state_dict({k: torch.from_numpy(x) for k, x in from_huggingface(oracle.json, raw)[1].items()})
    rng, sites = np.random.default_rng(0), dropout_sites(oracle.config, {"tokens": TOKENS})
    masks = {site: torch.from_numpy(rng.random(shape) > rate) for site, (own, shape) in sites.items() if own > 0}
    left = list(masks.values())
    inject(ours, masks)
    oracle.model.train()
    with torch.no_grad(), told_masks(left, rate):
        theirs = oracle.model(ids).logits.numpy()
        logits = ours(ids).logits.numpy()
    assert not left
    record(f"huggingface {name}", compared("7 dropout", {"logits": logits}, {"logits": theirs}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["BertForTokenClassification"], "id2label": ["no", "yes"]}, "id2label is ['no', 'yes']"),
        ({"architectures": ["BertForTokenClassification"], "num_labels": 0}, "num_labels is 0"),
        ({"architectures": ["BertModel"], "position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"architectures": ["BertForMaskedLM"], "is_decoder": True}, "is_decoder"),
        ({"architectures": ["DistilBertModel"], "activation": "mish"}, "activation is 'mish'"),
        ({"architectures": ["RobertaForMaskedLM"], "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"architectures": ["RobertaModel"], "pad_token_id": "<pad>"}, "pad_token_id is '<pad>'"),
        ({"architectures": ["RobertaModel"], "pad_token_id": 600}, "max_position_embeddings is -89"),
        ({"architectures": ["BertForNextSentencePrediction"]}, "expected one of"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        config_from_huggingface(settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("padding_token", [1, 0, 5])
@pytest.mark.parametrize("name", ["roberta masked", "roberta tokens", "roberta texts"])
def test_roberta_counts_positions_from_its_padding_token(name: str, padding_token: int, record: Record) -> None:
    """Told nothing but the mask, it leaves out the padding token, on either side, and so do we by the mask.

    A text's class is read from the first position, which padding on the left takes: there it has a position in theirs
    that no token has.
    """
    oracle = Oracle(name, pad_token_id=padding_token)
    assert oracle.config.encoder is not None
    assert oracle.config.encoder.position_offset == padding_token + 1
    raw = oracle.random_weights(0.2, 0)
    oracle.load(raw)
    model = reference(oracle.config.with_dtype("float64")).eval()
    model.load_state_dict({k: torch.from_numpy(x) for k, x in from_huggingface(oracle.json, raw)[1].items()})
    for padding in ("right",) if name == "roberta texts" else ("right", "left"):
        batch = oracle.batch(padding, 0)
        tokens, mask = batch["tokens"][:-1], batch["mask"][:-1]
        tokens = np.where(mask, tokens, padding_token)
        assert (tokens == padding_token).any()
        assert not (tokens[mask] == padding_token).any()
        with torch.no_grad():
            theirs = oracle.model(torch.from_numpy(tokens), torch.from_numpy(mask.astype(np.int64))).logits.numpy()
            ours = model(torch.from_numpy(tokens), torch.from_numpy(mask)).logits.numpy()
        shown = np.full(len(ours), True) if name == "roberta texts" else mask
        record(f"huggingface {name}", compared("1 activations", {"logits": ours[shown]}, {"logits": theirs[shown]}))


@pytest.mark.deep
def test_bert_base_at_full_size(record: Record) -> None:
    """109,514,298 parameters; the logits of a short text in float32, beside the truth in float64."""
    torch.manual_seed(0)
    theirs = BertForMaskedLM(BertConfig(attn_implementation="eager")).eval()
    assert sum(p.numel() for p in theirs.parameters()) == 109_514_298
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    config, weights = from_huggingface(config_json(theirs), state)
    params = from_reference(weights, transformer(config).shapes)
    ids = np.random.default_rng(0).integers(0, 30522, (2, 12))
    ours = np.asarray(jax.jit(transformer(config).apply)(params, jnp.asarray(ids, jnp.int32)))
    with torch.no_grad():
        single = theirs(torch.from_numpy(ids)).logits.numpy()
        exact = theirs.double()(torch.from_numpy(ids)).logits.numpy()
    assert ours.dtype == np.float32
    errors = [relative_error(logits, exact) for logits in (ours, single)]
    allowed = FLOAT32.factor * errors[1] + FLOAT32.floor
    record("bert-base, full size", Measured("3 float32 / allowed", errors[0] / allowed, 1.0, "logits"))
    # And back, bit for bit.
    back = to_huggingface("BertForMaskedLM", config, to_reference(params))[1]
    assert {name: array.tobytes() for name, array in back.items()} == {name: state[name].tobytes() for name in back}
