"""What codes, signals and the names of errors mean: cause, how to confirm it, what to do, and who says so.

Tables only, one file for each vocabulary; `index.py` finds a row by whatever a person has seen of it.
"""
