"""What people get wrong when they port a model, planted in the six pairs; all of it changes the outputs.

The places that may be named are those where the first number that differs is computed. Where an operation is missing
on one side, that is the one that comes next there.
"""

from collections.abc import Callable, Mapping

import numpy as np

from parity_tests.other_pairs.planting import Change, PairFault, Side

Arrays = dict[str, np.ndarray]


def fault(
    pair: str,
    side: Side,
    name: str,
    right: str,
    wrong: str,
    *,
    ours: tuple[str, ...] = (),
    theirs: tuple[str, ...] = (),
) -> PairFault:
    """A line that is wrong; `ours` and `theirs` are places besides that line."""
    return PairFault(name, pair, side, Change(right, wrong), ours, theirs)


def conversion(
    pair: str, name: str, change: Callable[[Arrays], Mapping[str, np.ndarray]], *parameters: str
) -> PairFault:
    """Parameters that were converted wrongly: they have other numbers than the map says."""
    return PairFault(name, pair, "weights", converted=change, parameters=parameters)


def swapped(first: str, second: str) -> Callable[[Arrays], Mapping[str, np.ndarray]]:
    """Two parameters, each in the other's place."""
    return lambda arrays: {first: arrays[second], second: arrays[first]}


def turned(path: str, *axes: int) -> Callable[[Arrays], Mapping[str, np.ndarray]]:
    """One parameter with its axes in another order."""
    return lambda arrays: {path: arrays[path].transpose(axes)}


ENCODER_LAYERS = (
    fault(
        "encoder_layers",
        "ours",
        "scores scaled by the model's width",
        "scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5",
        "scores = query @ key.swapaxes(-1, -2) / x.shape[-1] ** 0.5",
        theirs=("first.self_attn",),
    ),
    fault(
        "encoder_layers",
        "ours",
        "GELU by tanh",
        "return jax.nn.gelu(x, approximate=False)",
        "return jax.nn.gelu(x, approximate=True)",
        theirs=("first",),
    ),
    fault(
        "encoder_layers",
        "ours",
        "LayerNorm with another eps",
        "return centred / jnp.sqrt(variance + 1e-5)",
        "return centred / jnp.sqrt(variance + 1e-6)",
        theirs=("first.norm1",),
    ),
    fault(
        "encoder_layers",
        "ours",
        "LayerNorm with the unbiased variance",
        "variance = jnp.square(centred).mean(-1, keepdims=True)",
        "variance = x.var(-1, ddof=1, keepdims=True)",
        theirs=("first.norm1",),
    ),
    fault(
        "encoder_layers",
        "ours",
        "padding is attended to",
        "scores = jnp.where(padding[:, None, None], -jnp.inf, scores)",
        "scores = jnp.where(False, -jnp.inf, scores)",
        ours=("weights = jax.nn.softmax(scores, axis=-1)",),
        theirs=("first.self_attn",),
    ),
    fault(
        "encoder_layers",
        "ours",
        "heads merged in the wrong order",
        "mixed = (weights @ value).swapaxes(1, 2).reshape(x.shape)",
        "mixed = (weights @ value).reshape(x.shape)",
        ours=('return mixed @ p["output"]["kernel"]',),
        theirs=("first.self_attn", "first.self_attn.out_proj"),
    ),
    fault(
        "encoder_layers",
        "ours",
        "residual from the normalised input",
        'x = x + attention(p["attention"], layer_norm(p["norm1"], x), padding)',
        'x = (h := layer_norm(p["norm1"], x)) + attention(p["attention"], h, padding)',
        theirs=("first",),
    ),
    fault(
        "encoder_layers",
        "theirs",
        "the other placement of norms",
        'activation="relu", norm_first=False',
        'activation="relu", norm_first=True',
        ours=('jnp.einsum("btd,hcd->bhtc", x, p["', 'x = layer_norm(p["norm1"], x + attention'),
        theirs=("last", "last.norm1", "last.self_attn"),
    ),
    fault(
        "encoder_layers",
        "theirs",
        "GELU where a ReLU is meant",
        'activation="relu", norm_first=False',
        'activation="gelu", norm_first=False',
        ours=("hidden = activation(x", "feed_forward(p, x, jax.nn.relu)"),
        theirs=("last",),
    ),
    fault(
        "encoder_layers",
        "ours",
        "a bias left out",
        'return hidden @ p["down"]["kernel"] + p["down"]["bias"]',
        'return hidden @ p["down"]["kernel"]',
        ours=('x = x + feed_forward(p, layer_norm(p["norm2"], x), exact_gelu)',),
        theirs=("first.linear2",),
    ),
    conversion(
        "encoder_layers",
        "query and key in each other's place",
        swapped("first.attention.query.kernel", "first.attention.key.kernel"),
        "first.attention.query.kernel",
        "first.attention.key.kernel",
    ),
    conversion(
        "encoder_layers",
        "the output matrix transposed",
        turned("last.attention.output.kernel", 1, 0),
        "last.attention.output.kernel",
    ),
)

CONVOLUTIONS = (
    fault(
        "convolutions",
        "ours",
        "batch norm with another eps",
        'epsilon=1e-5, param_dtype=x.dtype, name="norm1")',
        'epsilon=1e-3, param_dtype=x.dtype, name="norm1")',
        theirs=("norm1",),
    ),
    fault(
        "convolutions",
        "ours",
        "stride of two with padding on one side",
        "strides=2, padding=1, use_bias=False",
        'strides=2, padding="SAME", use_bias=False',
        theirs=("conv2",),
    ),
    fault(
        "convolutions",
        "ours",
        "dilation left out",
        "kernel_dilation=2, padding=2",
        "padding=1",
        theirs=("conv3",),
    ),
    fault(
        "convolutions",
        "ours",
        "flattened with channels last",
        "x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)",
        "x = x.reshape(x.shape[0], -1)",
        ours=("return linen.Dense(CLASSES",),
        theirs=("head", "return self.head(x.flatten(1))"),
    ),
    fault(
        "convolutions",
        "theirs",
        "the mean where the maximum is meant",
        "x = F.max_pool2d(x, 2)",
        "x = F.avg_pool2d(x, 2)",
        ours=("x = linen.max_pool(",),
    ),
    fault(
        "convolutions",
        "theirs",
        "an activation forgotten",
        "x = F.relu(self.norm2(self.conv2(x)))",
        "x = self.norm2(self.conv2(x))",
        ours=("x = linen.relu(x) #2",),
        theirs=("conv3",),
    ),
    fault(
        "convolutions",
        "theirs",
        "the batch's statistics instead of the running ones",
        "x = F.relu(self.norm2(self.conv2(x)))",
        "x = F.relu(F.batch_norm(self.conv2(x), None, None, self.norm2.weight, self.norm2.bias, training=True))",
        ours=('name="norm2")',),
    ),
    fault(
        "convolutions",
        "ours",
        "activation after the residual, not before",
        "x = linen.silu(wide) + x",
        "x = linen.silu(wide + x)",
        theirs=("x = F.silu(self.conv3(x)) + x",),
    ),
    fault(
        "convolutions",
        "ours",
        "kernel with height and width exchanged",
        '"params.conv2.kernel": ("conv2.weight", KERNEL)',
        '"params.conv2.kernel": ("conv2.weight", "o i h w -> w h i o")',
        ours=('name="conv2")',),
        theirs=("conv2",),
    ),
    conversion(
        "convolutions",
        "deviations where variances are meant",
        lambda arrays: {"batch_stats.norm1.var": np.sqrt(arrays["batch_stats.norm1.var"])},
        "batch_stats.norm1.var",
    ),
)

STEP = ("from_x = x @", "from_h = h @", "= jnp.split(from_x", "reset = ", "update = ", "new = ")
GRU = (
    fault(
        "gru",
        "ours",
        "reset before the product, not after",
        "new = jnp.tanh(xn + reset * hn)",
        'new = jnp.tanh(xn + (reset * h) @ p["state"]["kernel"][:, -WIDTH:] + p["state"]["bias"][-WIDTH:])',
        theirs=("gru",),
    ),
    fault(
        "gru",
        "ours",
        "gates in another order",
        "(xr, xz, xn), (hr, hz, hn) = ",
        "(xz, xr, xn), (hz, hr, hn) = ",
        ours=("new = jnp.tanh(xn + reset * hn)",),
        theirs=("gru",),
    ),
    fault(
        "gru",
        "ours",
        "update gate the other way round",
        "h = (1 - update) * new + update * h",
        "h = update * new + (1 - update) * h",
        theirs=("gru",),
    ),
    fault(
        "gru",
        "ours",
        "the state's bias left out",
        'from_h = h @ p["state"]["kernel"] + p["state"]["bias"]',
        'from_h = h @ p["state"]["kernel"]',
        ours=("= jnp.split(from_x", "reset = jax.nn.sigmoid(xr + hr)", "update = jax.nn.sigmoid(xz + hz)"),
        theirs=("gru",),
    ),
    fault(
        "gru",
        "ours",
        "a first state of ones",
        "start = jnp.zeros(",
        "start = jnp.ones(",
        ours=('from_h = h @ p["state"]["kernel"]',),
        theirs=("gru",),
    ),
    fault(
        "gru",
        "ours",
        "from the last token to the first",
        "jax.lax.scan(step, start, x.swapaxes(0, 1))",
        "jax.lax.scan(step, start, x.swapaxes(0, 1), reverse=True)",
        ours=(*STEP, "jax.lax.scan(step, start"),
        theirs=("gru",),
    ),
    fault(
        "gru",
        "theirs",
        "batch and time exchanged",
        "num_layers=2, batch_first=True",
        "num_layers=2, batch_first=False",
        ours=(*STEP, "jax.lax.scan(step, start"),
        theirs=("gru",),
    ),
    fault(
        "gru",
        "theirs",
        "embeddings scaled",
        "x = self.embedding(tokens)",
        "x = self.embedding(tokens) * INPUT**0.5",
        ours=('x = params["embedding"][tokens]', "from_x = x @", "jax.lax.scan(step, start"),
    ),
    conversion(
        "gru",
        "a layer with another's weights",
        lambda arrays: {"layers.1.state.kernel": arrays["layers.0.state.kernel"]},
        "layers.1.state.kernel",
    ),
)

DISTILBERT = (
    fault(
        "distilbert",
        "ours",
        "scores scaled by the model's width",
        "query, key) * heads[-1] ** -0.5",
        "query, key) * WIDTH**-0.5",
        theirs=("model.transformer.layer.0.attention",),
    ),
    fault(
        "distilbert",
        "ours",
        "padding masked in the wrong axis",
        "scores = jnp.where(mask[:, None, None, :] != 0",
        "scores = jnp.where(mask[:, None, :, None] != 0",
        ours=("weights = jax.nn.softmax(scores, axis=-1)",),
        theirs=("model.transformer.layer.0.attention",),
    ),
    fault(
        "distilbert",
        "ours",
        "the library's own eps",
        "self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-12, use_fast_variance=False, rngs=rngs)",
        "self.norm2 = nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=rngs)",
        ours=("return self.norm2(x + self.down(hidden))",),
        theirs=("model.transformer.layer.0.output_layer_norm",),
    ),
    fault(
        "distilbert",
        "ours",
        "the library's own GELU",
        "hidden = nnx.gelu(self.up(x), approximate=False)",
        "hidden = nnx.gelu(self.up(x))",
        theirs=("model.transformer.layer.0.ffn", "model.transformer.layer.0.ffn.activation"),
    ),
    fault(
        "distilbert",
        "ours",
        "positions off by one",
        "self.positions(jnp.arange(tokens.shape[1]))",
        "self.positions(jnp.arange(tokens.shape[1]) + 1)",
        theirs=("model.embeddings", "model.embeddings.position_embeddings"),
    ),
    fault(
        "distilbert",
        "ours",
        "residual forgotten",
        "return self.norm2(x + self.down(hidden))",
        "return self.norm2(self.down(hidden))",
        theirs=("model.transformer.layer.0",),
    ),
    fault(
        "distilbert",
        "ours",
        "softmax over queries",
        "weights = jax.nn.softmax(scores, axis=-1)",
        "weights = jax.nn.softmax(scores, axis=-2)",
        theirs=("model.transformer.layer.0.attention",),
    ),
    fault(
        "distilbert",
        "library",
        "softmax in float32",
        "attn_weights = nn.functional.softmax(attn_weights, dim=-1)",
        "attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
        ours=("weights = jax.nn.softmax(scores, axis=-1)",),
    ),
    fault(
        "distilbert",
        "library",
        "dropout's factor left on",
        "    attn_output = torch.matmul(attn_weights, value)",
        "    attn_output = torch.matmul(attn_weights / 0.9, value)",
        ours=('mixed = jnp.einsum("bhts,bshc->bthc", weights, value)',),
    ),
    fault(
        "distilbert",
        "library",
        "residual from before the attention",
        "ffn_output = self.output_layer_norm(ffn_output + attention_output)",
        "ffn_output = self.output_layer_norm(ffn_output + hidden_states)",
        ours=("return self.norm2(x + self.down(hidden))",),
    ),
    conversion(
        "distilbert",
        "a layer with another's weights",
        swapped("blocks.0.up.kernel", "blocks.1.up.kernel"),
        "blocks.0.up.kernel",
        "blocks.1.up.kernel",
    ),
    conversion(
        "distilbert",
        "a square matrix transposed",
        turned("blocks.1.attention.query.kernel", 1, 0),
        "blocks.1.attention.query.kernel",
    ),
)

GPT_NEOX = (
    fault(
        "gpt_neox",
        "ours",
        "rotated in neighbours, not in halves",
        "turned = turned * cos + jnp.concatenate([-second, first], axis=-1) * sin",
        "turned = turned * cos + jnp.stack([-turned[..., 1::2], turned[..., ::2]], -1).reshape(turned.shape) * sin",
        theirs=("model.gpt_neox.layers.0.attention",),
    ),
    fault(
        "gpt_neox",
        "ours",
        "fused matrix cut in thirds, not by heads",
        'Weight(f"{fused}.weight", "(h part c) d -> part d h c", sizes, part)',
        'Weight(f"{fused}.weight", "(part h c) d -> part d h c", sizes, part)',
        ours=(
            'query = jnp.einsum("btd,dhc->bhtc"',
            'key = jnp.einsum("btd,dhc->bhtc"',
            'value = jnp.einsum("btd,dhc->bhtc"',
        ),
        theirs=("model.gpt_neox.layers.0.attention", "model.gpt_neox.layers.0.attention.query_key_value"),
    ),
    fault(
        "gpt_neox",
        "ours",
        "residuals one after the other",
        'fed = feed_forward(p, layer_norm(p["norm2"], x))',
        'fed = feed_forward(p, layer_norm(p["norm2"], x + attended))',
        ours=("centred = x - x.mean(-1, keepdims=True)",),
        theirs=("model.gpt_neox.layers.0.post_attention_layernorm", "model.gpt_neox.layers.0"),
    ),
    fault(
        "gpt_neox",
        "ours",
        "a token too many is seen",
        "visible = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))",
        "visible = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool), k=1)",
        ours=("scores = jnp.where(visible, scores", "weights = jax.nn.softmax(scores, axis=-1)"),
        # It makes the mask, and the first attention adds it.
        theirs=("model.gpt_neox", "model.gpt_neox.layers.0.attention"),
    ),
    fault(
        "gpt_neox",
        "ours",
        "another base of the rotation",
        "frequencies = 10000.0 ** ",
        "frequencies = 1000.0 ** ",
        ours=("turned = jnp.arange(length)", "return jnp.cos(turned), jnp.sin(turned)"),
        theirs=("model.gpt_neox.rotary_emb",),
    ),
    fault(
        "gpt_neox",
        "ours",
        "the key is not rotated",
        "query, key = rotate(query, cos, sin), rotate(key, cos, sin)",
        "query = rotate(query, cos, sin)",
        ours=("scores = query @ key.swapaxes(-1, -2)",),
        theirs=("model.gpt_neox.layers.0.attention",),
    ),
    fault(
        "gpt_neox",
        "ours",
        "eps outside the root",
        "jax.lax.rsqrt(variance + 1e-5)",
        "1 / (jnp.sqrt(variance) + 1e-5)",
        theirs=("model.gpt_neox.layers.0.input_layernorm",),
    ),
    fault(
        "gpt_neox",
        "ours",
        "the last norm forgotten",
        '    x = layer_norm(params["norm"], x)\n    return x @ params["embedding"].T',
        '    return x @ params["embedding"].T',
        theirs=("model.gpt_neox.final_layer_norm", "model.lm_head"),
    ),
    fault(
        "gpt_neox",
        "library",
        "one norm for both branches",
        "            mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))\n"
        "            mlp_output = self.post_mlp_dropout(mlp_output)\n"
        "            hidden_states = mlp_output + attn_output + hidden_states",
        "            mlp_output = self.mlp(self.input_layernorm(hidden_states))\n"
        "            mlp_output = self.post_mlp_dropout(mlp_output)\n"
        "            hidden_states = mlp_output + attn_output + hidden_states",
        ours=("return centred * jax.lax.rsqrt(variance + 1e-5)", "fed = feed_forward(p"),
        theirs=("model.gpt_neox.layers.0.mlp.dense_h_to_4h", "model.gpt_neox.layers.0.input_layernorm"),
    ),
    fault(
        "gpt_neox",
        "library",
        "values rotated too",
        "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)",
        "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)\n"
        "        value_states, _ = apply_rotary_pos_emb(value_states, key_states, cos, sin)",
        ours=("mixed = (weights @ value)",),
        theirs=("model.gpt_neox.layers.0.attention",),
    ),
    conversion(
        "gpt_neox",
        "a layer with another's weights",
        lambda arrays: {"layers.down.kernel": arrays["layers.down.kernel"][[0, 1, 1]]},
        "layers.down.kernel",
    ),
)

MIXER = (
    fault(
        "mixer",
        "ours",
        "the sum where the mean is meant",
        "return self.head(jnp.mean(x, axis=0))",
        "return self.head(jnp.sum(x, axis=0))",
        theirs=("return self.head(x.mean(1))",),
    ),
    fault(
        "mixer",
        "ours",
        "channels and patches mixed up",
        ".reshape(WIDTH, TOKENS).T",
        ".reshape(TOKENS, WIDTH)",
        ours=("normed = jax.vmap(self.norm1)(x)",),
        theirs=("blocks.0.norm1", "x = self.patches(images).flatten(2).mT"),
    ),
    fault(
        "mixer",
        "ours",
        "residual forgotten",
        "x = x + jax.vmap(self.tokens)(normed.T).T",
        "x = jax.vmap(self.tokens)(normed.T).T",
        ours=("normed = jax.vmap(self.norm2)(x)",),
        theirs=("blocks.0",),
    ),
    fault(
        "mixer",
        "ours",
        "the first norm used again",
        "normed = jax.vmap(self.norm2)(x)",
        "normed = jax.vmap(self.norm1)(x)",
        theirs=("blocks.0.norm2",),
    ),
    fault(
        "mixer",
        "theirs",
        "GELU by tanh",
        "F.gelu(self.up(x))",
        'F.gelu(self.up(x), approximate="tanh")',
        ours=("hidden = jax.nn.gelu(self.up(x), approximate=False)",),
        theirs=("blocks.0.tokens",),
    ),
    fault(
        "mixer",
        "theirs",
        "norm after the mean, not before",
        "        x = self.norm(x)\n        return self.head(x.mean(1))",
        "        x = x.mean(1)\n        return self.head(self.norm(x))",
        ours=("x = jax.vmap(self.norm)(x)",),
        theirs=("norm",),
    ),
    fault(
        "mixer",
        "ours",
        "LayerNorm with another eps",
        "self.norm = eqx.nn.LayerNorm(WIDTH, eps=1e-5)",
        "self.norm = eqx.nn.LayerNorm(WIDTH, eps=1e-6)",
        ours=("x = jax.vmap(self.norm)(x)",),
        theirs=("norm",),
    ),
    fault(
        "mixer",
        "theirs",
        "the maximum where the mean is meant",
        "return self.head(x.mean(1))",
        "return self.head(x.amax(1))",
        ours=("return self.head(jnp.mean(x, axis=0))",),
    ),
    conversion(
        "mixer",
        "two blocks in each other's place",
        swapped("blocks.0.tokens.up.weight", "blocks.1.tokens.up.weight"),
        "blocks.0.tokens.up.weight",
        "blocks.1.tokens.up.weight",
    ),
)

FORWARD = ENCODER_LAYERS + CONVOLUTIONS + GRU + DISTILBERT + GPT_NEOX + MIXER
