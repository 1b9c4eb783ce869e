"""A Monarch program whose training runs under holdfast: an actor judges each checkpoint while holdfast restarts ranks.

    python examples/monarch/controller.py PROGRAM [ARGUMENT...]

The program is any training script. Eleven lines use holdfast: two imports, and what follows `run =`.
"""

import sys
from pathlib import Path

from monarch.actor import Actor, endpoint, this_host

from holdfast import runs
from holdfast.events import CheckpointCommitted, RecoveryDecided


class Evaluator(Actor):
    """Looks at checkpoints in a process of Monarch's."""

    @endpoint
    def evaluate(self, path: str) -> str:
        found = Path(path)
        return f"{found.name}: {'a folder' if found.is_dir() else 'a file'}"


evaluator = this_host().spawn_procs(per_host={"evaluators": 1}).spawn("evaluator", Evaluator)

run = runs.start(command=(sys.executable, *sys.argv[1:]), nodes=2, name="train")
for event in run.events():
    if isinstance(event, CheckpointCommitted):
        print("checkpoint", event.step, evaluator.evaluate.call_one(event.path).get(timeout=60), flush=True)
    elif isinstance(event, RecoveryDecided):
        print("recovery", event.finding.what, flush=True)
if code := run.wait():
    print("failed", run.diagnose().what)
sys.exit(code)
