"""Calibration, self-test and provider selection."""
