"""Gates: a pair, its two sides, the weights that they share, and how far apart they are against which bar.

`check` runs the gates; where one is red, it asks `parity.differ` for the first place where the two sides part. All else
here is what the other rooms stand on.
"""
