"""What people get wrong when they port a model, planted in the pairs.

The places that may be named are those where the first number that differs is computed. Where an operation is missing
on one side, that is the one that comes next there.
"""

from dataclasses import replace

import numpy as np

from parity_tests.other_pairs.planting import PairFault as Fault

_OURS_ALONE = "ours hands a gradient back here, theirs does not"
_THEIRS_ALONE = "theirs hands a gradient back here, ours does not"
_STEP = "from_x = x @ | from_h = h @ | = jnp.split(from_x | reset =  | update =  | new =  | jax.lax.scan(step, start"
_NEOX = "model.gpt_neox"
_LAYER, _LAST = f"{_NEOX}.layers.0", f"{_NEOX}.layers.2"
_BRANCHES = (
    "            mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))\n"
    "            mlp_output = self.post_mlp_dropout(mlp_output)\n"
    "            hidden_states = mlp_output + attn_output + hidden_states"
)

_OF_PAIRS = {
    "convolutions": (
        Fault(
            "batch norm with another eps",
            "ours",
            'epsilon=1e-5, param_dtype=x.dtype, name="norm1")',
            'epsilon=1e-3, param_dtype=x.dtype, name="norm1")',
            theirs="norm1",
            kinds="0.001 in ours, 1e-05 in theirs",
        ),
        Fault(
            "stride of two with padding on one side",
            "ours",
            "strides=2, padding=1, use_bias=False",
            'strides=2, padding="SAME", use_bias=False',
            theirs="conv2",
        ),
        Fault("dilation left out", "ours", "kernel_dilation=2, padding=2", "padding=1", theirs="conv3"),
        Fault(
            "flattened with channels last",
            "ours",
            "x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)",
            "x = x.reshape(x.shape[0], -1)",
            "return linen.Dense(CLASSES",
            "head | return self.head(x.flatten(1))",
            "the same numbers in another order",
        ),
        Fault(
            "the mean where the maximum is meant",
            "theirs",
            "x = F.max_pool2d(x, 2)",
            "x = F.avg_pool2d(x, 2)",
            "x = linen.max_pool(",
        ),
        Fault(
            "an activation forgotten",
            "theirs",
            "x = F.relu(self.norm2(self.conv2(x)))",
            "x = self.norm2(self.conv2(x))",
            "x = linen.relu(x) #2",
            "conv3",
            "ours applies max with 0 here",
        ),
        Fault(
            "the batch's statistics instead of the running ones",
            "theirs",
            "x = F.relu(self.norm2(self.conv2(x)))",
            "x = F.relu(F.batch_norm(self.conv2(x), None, None, self.norm2.weight, self.norm2.bias, training=True))",
            'name="norm2")',
            kinds="norm2.mean",
        ),
        Fault(
            "activation after the residual, not before",
            "ours",
            "x = linen.silu(wide) + x",
            "x = linen.silu(wide + x)",
            theirs="x = F.silu(self.conv3(x)) + x",
            kinds="adds",
        ),
        Fault(
            "kernel with height and width exchanged",
            "ours",
            '"params.conv2.kernel": ("conv2.weight", KERNEL)',
            '"params.conv2.kernel": ("conv2.weight", "o i h w -> w h i o")',
            'name="conv2")',
            "conv2",
            "axes 0 and 1 of params.conv2.kernel",
        ),
        Fault(
            "deviations where variances are meant",
            "weights",
            kinds="its numbers are others",
            converted={"batch_stats.norm1.var": lambda arrays: np.sqrt(arrays["batch_stats.norm1.var"])},
        ),
        Fault(
            "ReLU that lets every gradient through",
            "ours",
            "x = linen.relu(x)\n        x = linen.max_pool(x, (2, 2), strides=(2, 2))",
            "x = x + jax.lax.stop_gradient(linen.relu(x) - x)\n        x = linen.max_pool(x, (2, 2), strides=(2, 2))",
            # Nothing is computed on the way back where the fault is, but for what comes next.
            'name="norm1")',
            "x = F.relu(self.norm1(self.conv1(x)))",
            _THEIRS_ALONE,
            "backward",
        ),
        Fault(
            "gradient of a bias dropped",
            "theirs",
            "return self.head(x.flatten(1))",
            "return F.linear(x.flatten(1), self.head.weight, self.head.bias.detach())",
            "return linen.Dense(CLASSES",
            "head",
            _OURS_ALONE,
            "backward",
        ),
        Fault(
            "a convolution frozen",
            "theirs",
            "x = F.relu(self.norm2(self.conv2(x)))",
            "x = F.relu(self.norm2(F.conv2d(x, self.conv2.weight.detach(), stride=2, padding=1)))",
            'name="conv2")',
            "conv2",
            _OURS_ALONE,
            "backward",
        ),
    ),
    "gru": (
        Fault(
            "reset before the product, not after",
            "ours",
            "new = jnp.tanh(xn + reset * hn)",
            'new = jnp.tanh(xn + (reset * h) @ p["state"]["kernel"][:, -WIDTH:] + p["state"]["bias"][-WIDTH:])',
            theirs="gru",
            kinds="theirs multiplies by the result of aten.sigmoid_",
        ),
        Fault(
            "gates in another order",
            "ours",
            "(xr, xz, xn), (hr, hz, hn) = ",
            "(xz, xr, xn), (hz, hr, hn) = ",
            "new = jnp.tanh(xn + reset * hn)",
            "gru",
            "exchanged, ours goes on as theirs does",
        ),
        Fault(
            "update gate the other way round",
            "ours",
            "h = (1 - update) * new + update * h",
            "h = update * new + (1 - update) * h",
            theirs="gru",
        ),
        Fault(
            "the state's bias left out",
            "ours",
            'from_h = h @ p["state"]["kernel"] + p["state"]["bias"]',
            'from_h = h @ p["state"]["kernel"]',
            "= jnp.split(from_x | reset = jax.nn.sigmoid(xr + hr) | update = jax.nn.sigmoid(xz + hz)",
            "gru",
            "theirs adds",
        ),
        Fault(
            "a first state of ones",
            "ours",
            "start = jnp.zeros(",
            "start = jnp.ones(",
            'from_h = h @ p["state"]["kernel"]',
            "gru",
        ),
        Fault(
            "from the last token to the first",
            "ours",
            "jax.lax.scan(step, start, x.swapaxes(0, 1))",
            "jax.lax.scan(step, start, x.swapaxes(0, 1), reverse=True)",
            _STEP,
            "gru",
            "in its place",
        ),
        Fault(
            "batch and time exchanged",
            "theirs",
            "num_layers=2, batch_first=True",
            "num_layers=2, batch_first=False",
            _STEP,
            "gru",
        ),
        Fault(
            "embeddings scaled",
            "theirs",
            "x = self.embedding(tokens)",
            "x = self.embedding(tokens) * INPUT**0.5",
            'x = params["embedding"][tokens] | from_x = x @ | jax.lax.scan(step, start',
            kinds="theirs multiplies by 3.4641 (sqrt(12)) here",
        ),
        Fault(
            "a layer with another's weights",
            "weights",
            kinds="it is gru.weight_hh_l0",
            converted={"layers.1.state.kernel": lambda arrays: arrays["layers.0.state.kernel"]},
        ),
        Fault(
            "the row of padding frozen",
            "theirs",
            "nn.Embedding(VOCABULARY, INPUT)",
            "nn.Embedding(VOCABULARY, INPUT, padding_idx=0)",
            'x = params["embedding"][tokens]',
            "embedding | x = self.embedding(tokens)",
            "row 0 is zero in theirs only",
            "backward",
        ),
        Fault(
            "gradients cut at every step of time",
            "ours",
            'from_h = h @ p["state"]["kernel"] + p["state"]["bias"]',
            'from_h = jax.lax.stop_gradient(h) @ p["state"]["kernel"] + p["state"]["bias"]',
            "h = (1 - update) * new + update * h",
            "gru",
            _THEIRS_ALONE,
            "backward",
        ),
        Fault(
            "straight-through forgotten",
            "ours",
            'return x @ params["head"]["kernel"] + params["head"]["bias"]',
            'return jnp.round(x * 8) / 8 @ params["head"]["kernel"] + params["head"]["bias"]',
            theirs="return self.head(x + ((x * 8).round() / 8 - x).detach()) | head | gru",
            kinds=_THEIRS_ALONE,
            stage="backward",
            setting=("return self.head(x)", "return self.head(x + ((x * 8).round() / 8 - x).detach())"),
        ),
    ),
    "gpt_neox": (
        Fault(
            "rotated in neighbours, not in halves",
            "ours",
            "turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin",
            "turned = turned * cos + jnp.stack([-turned[..., 1::2], turned[..., ::2]], -1).reshape(turned.shape) * sin",
            theirs=f"{_LAYER}.attention",
        ),
        Fault(
            "fused matrix cut in thirds, not by heads",
            "ours",
            'Weight(f"{fused}.weight", "(h part c) d -> part d h c", sizes, part)',
            'Weight(f"{fused}.weight", "(part h c) d -> part d h c", sizes, part)',
            'jnp.einsum("btd,dhc->bhtc"',
            f"{_LAYER}.attention | {_LAYER}.attention.query_key_value",
        ),
        Fault(
            "residuals one after the other",
            "ours",
            'fed = feed_forward(p, layer_norm(p["norm2"], x))',
            'fed = feed_forward(p, layer_norm(p["norm2"], x + attended))',
            "centred = x - x.mean(-1, keepdims=True)",
            f"{_LAYER}.post_attention_layernorm | {_LAYER}",
            "ours adds",
        ),
        Fault(
            "a token too many is seen",
            "ours",
            "visible = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))",
            "visible = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool), k=1)",
            "scores = jnp.where(visible, scores | weights = jax.nn.softmax(scores, axis=-1)",
            # It makes the mask, and the first attention adds it.
            f"{_NEOX} | {_LAYER}.attention",
            "only theirs masks key 1 from query 0",
        ),
        Fault(
            "another base of the rotation",
            "ours",
            "frequencies = 10000.0 ** ",
            "frequencies = 1000.0 ** ",
            "turned = jnp.arange(length) | return jnp.cos(turned), jnp.sin(turned)",
            f"{_NEOX}.rotary_emb",
            "; with `freqs = position_ids",
        ),
        Fault(
            "the key is not rotated",
            "ours",
            "query, key = rotate(query, cos, sin), rotate(key, cos, sin)",
            "query = rotate(query, cos, sin)",
            "scores = query @ key.swapaxes(-1, -2)",
            f"{_LAYER}.attention",
        ),
        Fault(
            "eps outside the root",
            "ours",
            "jax.lax.rsqrt(variance + 1e-5)",
            "1 / (jnp.sqrt(variance) + 1e-5)",
            theirs=f"{_LAYER}.input_layernorm",
        ),
        Fault(
            "the last norm forgotten",
            "ours",
            '    x = layer_norm(params["norm"], x)\n    return x @ params["embedding"].T',
            '    return x @ params["embedding"].T',
            theirs=f"{_NEOX}.final_layer_norm | model.lm_head",
            kinds="self.final_layer_norm(hidden_states)` here; without that, theirs goes on as ours does",
        ),
        Fault(
            "one norm for both branches",
            "library",
            _BRANCHES,
            _BRANCHES.replace("post_attention_layernorm", "input_layernorm"),
            "return centred * jax.lax.rsqrt(variance + 1e-5) | fed = feed_forward(p | hidden = jax.nn.gelu(x @",
            f"{_LAYER}.mlp.dense_h_to_4h | {_LAYER}.input_layernorm",
            "theirs reads `mlp_output = self.mlp(self.input_layernorm(hidden_states))`",
        ),
        Fault(
            "values rotated too",
            "library",
            "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)",
            "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)\n"
            "        value_states, _ = apply_rotary_pos_emb(value_states, key_states, cos, sin)",
            "mixed = (weights @ value)",
            f"{_LAYER}.attention",
        ),
        Fault(
            "a layer with another's weights",
            "weights",
            kinds=f"it is {_NEOX}.layers.1.mlp.dense_4h_to_h.weight",
            converted={"layers.down.kernel": lambda arrays: arrays["layers.down.kernel"][[0, 1, 1]]},
        ),
        Fault(
            "a tied head untied",
            "ours",
            'return x @ params["embedding"].T',
            'return x @ jax.lax.stop_gradient(params["embedding"]).T',
            'x = params["embedding"][tokens]',
            f"model.lm_head | {_NEOX}.embed_in",
            _THEIRS_ALONE,
            "backward",
        ),
        Fault(
            "gradient halved",
            "ours",
            '    x, _ = jax.lax.scan(layer, x, params["layers"])',
            '    x = 0.5 * x + jax.lax.stop_gradient(0.5 * x)\n    x, _ = jax.lax.scan(layer, x, params["layers"])',
            'x = params["embedding"][tokens]',
            f"{_NEOX}.embed_in | {_LAYER} | {_LAYER}.input_layernorm | {_LAYER}.post_attention_layernorm",
            "ours is 0.5 | ours multiplies by 0.5",
            "backward",
        ),
        Fault(
            "one branch detached from its input",
            "library",
            _BRANCHES,
            _BRANCHES.replace("norm(hidden_states)", "norm(hidden_states.detach())"),
            "centred = x - x.mean(-1, keepdims=True) | return centred * jax.lax.rsqrt"
            ' | fed = feed_forward(p, layer_norm(p["norm2"], x))',
            f"{_LAST}.post_attention_layernorm | {_LAST}.input_layernorm | {_LAST}",
            _OURS_ALONE,
            "backward",
        ),
    ),
}
FAULTS = [replace(fault, pair=pair) for pair, faults in _OF_PAIRS.items() for fault in faults]
