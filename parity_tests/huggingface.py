"""The third oracle: Hugging Face's own models, of reduced configs, with random weights, run on our batches."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from jax_tformer.config import TransformerConfig
from jax_tformer.hub.families import from_huggingface
from parity.gates import torch_side
from parity.gates.bridge import Values, from_torch, to_torch
from parity.gates.measure import incomparable, require_same_names, worst
from parity.gates.pytrees import paths
from parity.islands import Float64
from parity_tests.oracles import ENTRIES
from torch_ref.masks import position_ids
from torch_ref.training import cross_entropy
from twin.cases import batch_for
from twin.pair import Pair

MASKS = {"tokens": "mask", "source": "source_mask", "target": "target_mask"}
INPUTS = {
    "tokens": "input_ids",
    "source": "input_ids",
    "target": "decoder_input_ids",
    "token_types": "token_type_ids",
    "mask": "attention_mask",
    "source_mask": "attention_mask",
    "target_mask": "decoder_attention_mask",
}
"""What Hugging Face calls our inputs."""


class Oracle:
    """A Hugging Face model of one class and type, with the interface of `bridge.Pair`."""

    def __init__(self, name, dtype="float64", **settings):
        """`settings` are changes of the reduced config."""
        self.entry = ENTRIES[name]
        kind, self._widens = self.entry.kind, self.entry.islands and dtype == "float64"
        config = kind.config_class(**{**self.entry.settings, **settings}, attn_implementation="eager")
        with self.whole():
            self.model = kind(config).eval()
            self.entry.prepare(self.model)
        self._fresh = {name: tensor.detach().double().numpy() for name, tensor in self.kept().items()}
        # Buffers that are not saved keep their type, as in `from_pretrained`: frequencies of rotations are no bfloat16.
        for tensor in (*self.model.parameters(), *self.kept().values()):
            tensor.data = tensor.data.to(getattr(torch, dtype))
        for tensor in self.kept().values():
            tensor.requires_grad_()
        self.json = config_json(self.model)
        self.config: TransformerConfig = from_huggingface(self.json, self._fresh)[0]
        self._hidden, self._positions = {}, {}
        self._watch()

    def whole(self):
        """While this is on, nothing of a float64 model is computed in float32."""
        return Float64() if self._widens else nullcontext()

    def random_weights(self, std, seed):
        """Float64 weights by the names that the model saves: matrices N(0, std^2), vectors off their 0 and 1."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.normal(fresh.round(), 0.1) if fresh.size in fresh.shape else rng.normal(0, std, fresh.shape)
            for name, fresh in self._fresh.items()
        }

    def load(self, weights):
        """Gives the model these weights, rounded to its type; returns them as ours, which are not."""
        with torch.no_grad():
            for name, tensor in self.kept().items():
                tensor.copy_(to_torch(weights[name].copy()))
        return from_huggingface(self.json, weights)[1]

    def pair(self, std, seed, dtype="float64"):
        """Ours of both frameworks, with random weights, which the model gets as well."""
        return Pair(self.config, self.load(self.random_weights(std, seed)), dtype, optimised=dtype == "float32")

    def run(self, batch, *, backward=True):
        """Forward and backward; activations and gradients are named as ours."""
        arrays = {name: torch.from_numpy(array) for name, array in batch.items()}
        self._positions = {
            name: position_ids(arrays[name], arrays[MASKS[name]])
            for name in self.entry.position_tables
            if MASKS[name] in arrays
        }

        def forward():
            with self.whole():
                output = self.model(**self._inputs(arrays), output_attentions=True)
            first = self.entry.to_logits(self.model, output[0])
            outputs = {"logits": first}
            if (pooled := output.get("pooler_output")) is not None:
                outputs["pooled"] = pooled
            activations = outputs | self._hidden | self._weights(output)
            if self.config.head == "none":
                loss = torch.stack([x.square().mean() for x in outputs.values()]).sum()
            else:
                # The class of a text is the label of one token.
                logits = first if first.ndim == 3 else first[:, None]
                loss = cross_entropy(logits, arrays["labels"])
                losses = F.cross_entropy(logits.flatten(0, 1), arrays["labels"].flatten(), reduction="none")
                activations["loss of each token"] = losses.view(arrays["labels"].shape)
            return loss, activations | {"loss": loss}

        activations, gradients, _ = torch_side.backward(self.kept() if backward else {}, forward)
        return Values(activations, from_huggingface(self.json, gradients)[1] if backward else {})

    def logits(self, *ids, model=None):
        """Of sequences without padding (a source and a target, or one), by this model or another of its class."""
        model, tensors = model or self.model, (torch.from_numpy(each) for each in ids)
        with torch.no_grad(), self.whole():
            output = model(**dict(zip(("input_ids", "decoder_input_ids"), tensors, strict=False)))
            return from_torch(self.entry.to_logits(model, output[0]))

    def batch(self, padding, seed):
        """A batch for this model.

        Without a head the loss counts every position, so that the last row, which is padding alone and differs (see
        `comparable`), has to be left out.
        """
        batch = batch_for(self.config, padding, seed)
        if (padding_token := self.model.config.pad_token_id) is not None:
            # PyTorch does not train the row of this token.
            batch["tokens"][batch["tokens"] == padding_token] = padding_token + 1
        return {name: array[:-1] for name, array in batch.items()} if self.config.head == "none" else batch

    def kept(self):
        """What the model saves, tied arrays once: its parameters, and the bias of logits that BART has as a buffer."""
        saved = self.model.state_dict().keys() - set(self.model._keys_to_ignore_on_save or ())
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor for name, tensor in tensors if name in saved}

    def _inputs(self, arrays):
        inputs = {name: arrays[ours].long() for ours, name in INPUTS.items() if ours in arrays}
        # Hugging Face counts from the start of the row unless it is told.
        if "mask" in arrays and not self.entry.position_tables:
            inputs["position_ids"] = position_ids(arrays["tokens"], arrays["mask"]) + self.entry.first_position
        return inputs

    def _weights(self, output):
        """The attention weights of all layers."""
        places = {
            "attentions": (list(self.entry.stacks)[-1], "self_attention"),
            "encoder_attentions": ("encoder", "self_attention"),
            "decoder_attentions": ("decoder", "self_attention"),
            "cross_attentions": ("decoder", "cross_attention"),
        }
        return {
            f"{side}.{layer}.{kind}": weights
            for name, (side, kind) in places.items()
            for layer, weights in enumerate(output.get(name) or ())
        }

    def _watch(self):
        def keep(name, module, inputs, output):
            self._hidden[name] = output[0] if isinstance(output, tuple) else output

        def tell(name, table, inputs, output):
            # BART counts from the start of the row and takes no positions. This is the table's own lookup, which adds
            # its offset; it takes one row of positions.
            if (positions := self._positions.pop(name, None)) is not None:
                output = table.forward(inputs[0], position_ids=positions.flatten()).view(*positions.shape, -1)
            return output

        for side, blocks in self.entry.stacks.items():
            for layer, block in enumerate(self.model.base_model.get_submodule(blocks)):
                block.register_forward_hook(partial(keep, f"{side}.{layer}.hidden"))
        for name, table in self.entry.position_tables.items():
            self.model.get_submodule(table).register_forward_hook(partial(tell, name))


def config_json(model):
    """The model's config.json, parsed."""
    return model.config.to_dict() | {"architectures": [type(model).__name__]}


def masked(batch):
    """The batch with its masks, all true where it has none: JAX then compiles one function and not two."""
    return {mask: np.ones(batch[name].shape, bool) for name, mask in MASKS.items() if name in batch} | batch


def comparable(config, batch, activations):
    """The activations at the positions that may attend to something, flattened to `[N, ...]`.

    At the others (padding alone before them, in the window or in the whole row) ours attends to nothing, and Hugging
    Face, whose mask adds a large negative number to all scores alike, to everything. Nothing else depends on them: no
    position may attend to padding, and its labels are ignored.
    """
    batch = masked(batch)
    source = batch["source_mask" if "source" in batch else "mask"]
    target = batch["target_mask" if "target" in batch else "mask"]
    some = source.any(axis=1, keepdims=True)
    before = target.cumsum(axis=1)
    if config.decoder is not None and (window := config.decoder.window) is not None:
        before[:, window:] -= before[:, :-window].copy()
    seen = {"encoder": np.broadcast_to(some, source.shape), "decoder": (before > 0) & some}
    # Logits and losses stand on the last stack.
    seen["output"] = seen["encoder" if config.decoder is None else "decoder"]
    seen["pooled"] = some[:, 0]
    if config.head == "classify_text":
        seen["output"] = some[:, 0]

    def there(name, array):
        side, kind = name.split(".")[0], name.split(".")[-1]
        return (array.swapaxes(1, 2) if kind.endswith("attention") else array)[seen.get(side, seen["output"])]

    return {name: there(name, array) if array.ndim else array for name, array in activations.items()}


def bytes_lost(*trees):
    """Gate 9: how many bytes differ in the arrays of two trees, which have to agree in paths, shapes and types."""
    first, second = ({path: np.asarray(leaf) for path, leaf in paths(tree).items()} for tree in trees)
    require_same_names("9", first, second)
    lost = {}
    for path, array in first.items():
        before, after = (np.frombuffer(x.tobytes(), np.uint8) for x in (array, second[path]))
        lost[path] = incomparable(path, array, second[path]) or float(np.sum(before != after))
    return worst("9 bytes lost", lost, 0.0)


IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def save_checkpoint(name, folder, tokenizer, dtype="float32", **settings):
    """A folder as Hugging Face writes it: fresh weights and this tokenizer; returns the model."""
    torch.manual_seed(0)
    model = Oracle(name, dtype, vocab_size=len(tokenizer), **IDS | settings).model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
