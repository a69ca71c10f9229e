"""Faults that leave every output as it is and change gradients, planted in the six pairs."""

from parity_tests.other_pairs.planting import Change, PairFault

BACKWARD = (
    PairFault(
        "attention weights detached",
        "encoder_layers",
        "ours",
        Change(
            "weights = jax.nn.softmax(scores, axis=-1)",
            "weights = jax.lax.stop_gradient(jax.nn.softmax(scores, axis=-1))",
        ),
        ours=("mixed = (weights @ value)", "scores = query @ key"),
        theirs=("last.self_attn",),
    ),
    PairFault(
        "the variance of a norm detached",
        "encoder_layers",
        "ours",
        Change(
            "variance = jnp.square(centred).mean(-1, keepdims=True)",
            "variance = jax.lax.stop_gradient(jnp.square(centred).mean(-1, keepdims=True))",
        ),
        ours=("return centred / jnp.sqrt(variance + 1e-5)",),
        theirs=("last.norm2",),
    ),
    PairFault(
        "GELU with the derivative of another",
        "encoder_layers",
        "ours",
        Change(
            "def exact_gelu(x: jax.Array) -> jax.Array:\n    return jax.nn.gelu(x, approximate=False)",
            "@jax.custom_vjp\n"
            "def exact_gelu(x: jax.Array) -> jax.Array:\n"
            "    return jax.nn.gelu(x, approximate=False)\n\n\n"
            "def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:\n"
            "    return exact_gelu(x), x\n\n\n"
            "def backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:\n"
            "    return (jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)[1](g)[0],)\n\n\n"
            "exact_gelu.defvjp(forward, backward)",
        ),
        ours=("hidden = activation(x",),
        theirs=("first",),
    ),
    PairFault(
        "ReLU that lets every gradient through",
        "convolutions",
        "ours",
        Change(
            "x = linen.relu(x)\n        x = linen.max_pool(x, (2, 2), strides=(2, 2))",
            "x = x + jax.lax.stop_gradient(linen.relu(x) - x)\n        x = linen.max_pool(x, (2, 2), strides=(2, 2))",
        ),
        # Nothing is computed on the way back where the fault is, but for what comes next.
        ours=('name="norm1")',),
        theirs=("x = F.relu(self.norm1(self.conv1(x)))",),
    ),
    PairFault(
        "gradient of a bias dropped",
        "convolutions",
        "theirs",
        Change(
            "return self.head(x.flatten(1))",
            "return F.linear(x.flatten(1), self.head.weight, self.head.bias.detach())",
        ),
        ours=("return linen.Dense(CLASSES",),
        theirs=("head",),
    ),
    PairFault(
        "a convolution frozen",
        "convolutions",
        "theirs",
        Change(
            "x = F.relu(self.norm2(self.conv2(x)))",
            "x = F.relu(self.norm2(F.conv2d(x, self.conv2.weight.detach(), stride=2, padding=1)))",
        ),
        ours=('name="conv2")',),
        theirs=("conv2",),
    ),
    PairFault(
        "the row of padding frozen",
        "gru",
        "theirs",
        Change("nn.Embedding(VOCABULARY, INPUT)", "nn.Embedding(VOCABULARY, INPUT, padding_idx=0)"),
        ours=('x = params["embedding"][tokens]',),
        theirs=("embedding", "x = self.embedding(tokens)"),
    ),
    PairFault(
        "gradients cut at every step of time",
        "gru",
        "ours",
        Change(
            'from_h = h @ p["state"]["kernel"] + p["state"]["bias"]',
            'from_h = jax.lax.stop_gradient(h) @ p["state"]["kernel"] + p["state"]["bias"]',
        ),
        ours=("h = (1 - update) * new + update * h",),
        theirs=("gru",),
    ),
    PairFault(
        "straight-through forgotten",
        "gru",
        "ours",
        Change(
            'return x @ params["head"]["kernel"] + params["head"]["bias"]',
            'return jnp.round(x * 8) / 8 @ params["head"]["kernel"] + params["head"]["bias"]',
        ),
        setting=(Change("return self.head(x)", "return self.head(x + ((x * 8).round() / 8 - x).detach())"),),
        ours=(),
        theirs=("return self.head(x + ((x * 8).round() / 8 - x).detach())", "head", "gru"),
    ),
    PairFault(
        "a residual detached",
        "distilbert",
        "ours",
        Change(
            "return self.norm2(x + self.down(hidden))",
            "return self.norm2(jax.lax.stop_gradient(x) + self.down(hidden))",
        ),
        ours=("x = self.norm1(x + self.attention(x, mask))", "hidden = nnx.gelu(self.up(x), approximate=False)"),
        theirs=(
            "model.transformer.layer.1",
            "model.transformer.layer.1.output_layer_norm",
            "model.transformer.layer.1.sa_layer_norm",
            "model.transformer.layer.1.ffn.lin1",
        ),
    ),
    PairFault(
        "attention weights detached in the library",
        "distilbert",
        "library",
        Change(
            "    attn_output = torch.matmul(attn_weights, value)",
            "    attn_output = torch.matmul(attn_weights.detach(), value)",
        ),
        ours=(
            'mixed = jnp.einsum("bhts,bshc->bthc", weights, value)',
            "weights = jax.nn.softmax(scores, axis=-1)",
            'scores = jnp.einsum("bthc,bshc->bhts", query, key)',
        ),
        theirs=("model.transformer.layer.1.attention",),
    ),
    PairFault(
        "a tied head untied",
        "gpt_neox",
        "ours",
        Change('return x @ params["embedding"].T', 'return x @ jax.lax.stop_gradient(params["embedding"]).T'),
        ours=('x = params["embedding"][tokens]',),
        theirs=("model.lm_head", "model.gpt_neox.embed_in"),
    ),
    PairFault(
        "gradient halved",
        "gpt_neox",
        "ours",
        Change(
            '    x, _ = jax.lax.scan(layer, x, params["layers"])',
            '    x = 0.5 * x + jax.lax.stop_gradient(0.5 * x)\n    x, _ = jax.lax.scan(layer, x, params["layers"])',
        ),
        ours=('x = params["embedding"][tokens]',),
        theirs=(
            "model.gpt_neox.embed_in",
            "model.gpt_neox.layers.0",
            "model.gpt_neox.layers.0.input_layernorm",
            "model.gpt_neox.layers.0.post_attention_layernorm",
        ),
    ),
    PairFault(
        "one branch detached from its input",
        "gpt_neox",
        "library",
        Change(
            "            mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))\n"
            "            mlp_output = self.post_mlp_dropout(mlp_output)\n"
            "            hidden_states = mlp_output + attn_output + hidden_states",
            "            mlp_output = self.mlp(self.post_attention_layernorm(hidden_states.detach()))\n"
            "            mlp_output = self.post_mlp_dropout(mlp_output)\n"
            "            hidden_states = mlp_output + attn_output + hidden_states",
        ),
        ours=(
            "centred = x - x.mean(-1, keepdims=True)",
            "return centred * jax.lax.rsqrt",
            'fed = feed_forward(p, layer_norm(p["norm2"], x))',
        ),
        theirs=(
            "model.gpt_neox.layers.2.post_attention_layernorm",
            "model.gpt_neox.layers.2.input_layernorm",
            "model.gpt_neox.layers.2",
        ),
    ),
    PairFault(
        "the scale of a norm frozen",
        "mixer",
        "theirs",
        Change(
            "x = self.norm(x)\n",
            "x = F.layer_norm(x, (WIDTH,), self.norm.weight.detach(), self.norm.bias)\n",
        ),
        ours=("x = jax.vmap(self.norm)(x)",),
        theirs=("norm",),
    ),
    PairFault(
        "the input of a branch detached",
        "mixer",
        "ours",
        Change(
            "return x + jax.vmap(self.channels)(normed)",
            "return x + jax.vmap(self.channels)(jax.lax.stop_gradient(normed))",
        ),
        ours=("normed = jax.vmap(self.norm2)(x)", "hidden = jax.nn.gelu(self.up(x), approximate=False)"),
        theirs=("blocks.1.norm2", "blocks.1.channels.up", "blocks.1"),
    ),
)
