"""The figures that the source documents print; a document is called by the number that its file begins with."""

import numpy as np


def _printed(text):
    """Numbers as they stand in the text, line by line."""
    return np.loadtxt(text.strip().splitlines()).tolist()


DENOMINATORS = _printed("1.0000 21.5443 464.1590")
POSITIONS = _printed(
    """
     0.0000  1.0000  0.0000  1.0000  0.0000  1.0000
     0.8415  0.5403  0.0464  0.9989  0.0022  1.0000
     0.9093 -0.4161  0.0927  0.9957  0.0043  1.0000
     0.1411 -0.9900  0.1388  0.9903  0.0065  1.0000
    -0.7568 -0.6536  0.1846  0.9828  0.0086  1.0000
    -0.9589  0.2837  0.2300  0.9732  0.0108  0.9999
    -0.2794  0.9602  0.2749  0.9615  0.0129  0.9999
     0.6570  0.7539  0.3192  0.9477  0.0151  0.9999
     0.9894 -0.1455  0.3629  0.9318  0.0172  0.9999
     0.4121 -0.9111  0.4057  0.9140  0.0194  0.9998
    """
)
CAUSAL = np.array(
    _printed(
        """
        1 0 0 0 0 0 0 0 0 0
        1 1 0 0 0 0 0 0 0 0
        1 1 1 0 0 0 0 0 0 0
        1 1 1 1 0 0 0 0 0 0
        1 1 1 1 1 0 0 0 0 0
        1 1 1 1 1 1 0 0 0 0
        1 1 1 1 1 1 1 0 0 0
        1 1 1 1 1 1 1 1 0 0
        1 1 1 1 1 1 1 1 1 0
        1 1 1 1 1 1 1 1 1 1
        """
    ),
    int,
).tolist()
# 001: the output of its attention for the first sentence; the first column of its normalisation, by hand; and that of
# the normalised sum with the input, which it does not print.
ATTENTION_OUTPUT = _printed(
    """
    -3.9014 -2.5143  0.5328  2.1713 11.6392 -4.5111
    -3.9261 -2.5294  0.5359  2.1826 11.7051 -4.5360
    -3.9235 -2.5278  0.5356  2.1814 11.6980 -4.5333
    -2.9408 -1.9877  0.5475  1.6745  8.8760 -3.4817
     1.7852  1.0139 -0.2578 -0.4185 -3.4584  1.2042
    -3.9260 -2.5294  0.5359  2.1826 11.7050 -4.5360
     1.8151  1.0338 -0.2649 -0.4310 -3.5336  1.2330
    -3.9244 -2.5284  0.5357  2.1818 11.7005 -4.5343
    -3.9097 -2.5193  0.5338  2.1751 11.6612 -4.5194
    -3.9217 -2.5267  0.5354  2.1806 11.6933 -4.5315
    """
)
NORMALISED_SUM = _printed("-0.9511 -0.7062 -0.7170 -0.5669 1.0509 -0.6046 0.6238 -0.7322 -0.8901 -0.8219")
NORMALISED = _printed("-0.8153 -0.8156 -0.8156 -0.8085 1.0473 -0.8156 1.0442 -0.8156 -0.8154 -0.8156")

# 002: one head's view of "horizon", the last of six tokens.
QUERY = _printed("0.9100 0.3448")
KEYS = _printed(
    """
     0.0921  0.9907
     0.5637  0.7303
     0.1860  0.4071
     0.8067  0.1776
     0.7002  0.6632
     0.9094  0.3594
    """
)
VALUES = _printed(
    """
     0.5637  0.4056
     0.9803  0.0100
     0.4111  0.3980
     0.6882  0.9797
     0.5551  0.7583
     0.3060  0.2141
    """
)
SCORES = _printed("0.4254 0.7648 0.3096 0.7953 0.8659 0.9515")
WEIGHTS = _printed("0.1252 0.1758 0.1115 0.1812 0.1945 0.2119")
OUTPUT = _printed("0.5863 0.4673")
# The same row if the scores are scaled, as the text of 002 says; no document prints it.
SCALED_WEIGHTS = _printed("0.1368 0.1740 0.1261 0.1778 0.1868 0.1985")
SCALED_OUTPUT = _printed("0.5863 0.4658")


def assert_prints(array, printed):
    """`array`, rounded to four decimals, is `printed`."""
    np.testing.assert_array_equal(np.round(np.asarray(array), 4), printed)
