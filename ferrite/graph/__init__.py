"""FX graph in, FX graph out: the passes before, across and after autograd, and what they share."""
