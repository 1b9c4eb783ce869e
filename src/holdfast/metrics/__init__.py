"""Training metrics: the catalogue, and the arithmetic behind it."""
