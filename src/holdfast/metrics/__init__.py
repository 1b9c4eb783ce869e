"""What is measured of a training run: the catalogue of metrics, and the arithmetic behind them."""
