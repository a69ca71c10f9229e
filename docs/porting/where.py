"""Where do the port and the module part?"""

import module
import numpy as np
import opt

from parity import first_difference

tokens = np.random.default_rng(0).integers(0, 50, (2, 10))
tokens[:, 3] = opt.PADDING
print(first_difference(opt.opt, module.opt(), opt.WEIGHTS, [tokens], name="OPT"))
