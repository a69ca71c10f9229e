"""Where do the port and the module part?"""

import module
import opt

from parity import first_difference

print(first_difference(opt.opt, module.opt(), opt.WEIGHTS, [module.tokens()], name="OPT"))
