import numpy
from port import WEIGHTS, block
from reference import Block


def test_block(parity):
    x = numpy.random.default_rng(0).standard_normal((8, 16))
    parity.check(block, Block(), WEIGHTS, [x])
