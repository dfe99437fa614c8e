"""Precisions of linear maps, and the arithmetic behind them."""
