"""The live page of runs, in a browser."""
