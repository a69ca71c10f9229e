import module
import opt

from parity.plugin import Parity


def test_opt(parity: Parity) -> None:
    inputs, gates = [module.tokens()], ["9", "1", "2"]
    parity.check(opt.opt, module.opt(), opt.WEIGHTS, inputs, gates=gates, zero_gradients=opt.KEY_BIASES)
