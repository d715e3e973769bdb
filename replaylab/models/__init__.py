"""Plain modules without training code."""
