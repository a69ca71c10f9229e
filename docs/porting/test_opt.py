import module
import numpy as np
import opt


def test_opt(parity):
    tokens = np.random.default_rng(0).integers(0, 50, (2, 10))
    tokens[:, 3] = opt.PADDING
    parity.check(opt.opt, module.opt(), opt.WEIGHTS, [tokens], gates=["9", "1", "2"], zero_gradients=ZERO, name="OPT")
