"""Explains finding codes, signals and error names: cause, how to confirm it, what to do, and the source.

Tables only, one file for each vocabulary; `index.py` looks up a row by code or alias.
"""
