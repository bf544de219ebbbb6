"""Side-by-side measurements, run by `make bench`. Every line is a ratio taken in one run, never a time."""
