"""What the fabric did: which transport joined which ranks, read from the lines NCCL prints while it sets itself up.

`read` takes blocks of lines and gives a frozen `Transport`; `lines` says it to a person, `document` to a machine, and
`facts` to the reasoning about what went wrong.
"""

from holdfast.diagnose.transport.document import document
from holdfast.diagnose.transport.facts import facts, is_sound
from holdfast.diagnose.transport.reading import Reading, read
from holdfast.diagnose.transport.result import Communicator, Evidence, Link, Member, Transport, Verdict, Way
from holdfast.diagnose.transport.words import lines

__all__ = [
    "Communicator",
    "Evidence",
    "Link",
    "Member",
    "Reading",
    "Transport",
    "Verdict",
    "Way",
    "document",
    "facts",
    "is_sound",
    "lines",
    "read",
]
