"""Hides packages that the frameworks import where installed and no program uses: half of their start-up time.

The tests of holdfast's trackers and stores install these; a user of the framework alone does not have them.
"""

import sys

for name in ("boto3", "datasets", "mlflow", "pandas", "tensorboard", "triton"):
    sys.modules.setdefault(name, None)
