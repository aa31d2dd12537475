"""The chain of operations between a linear and a reduction, used to match heads and feed-forward blocks."""
