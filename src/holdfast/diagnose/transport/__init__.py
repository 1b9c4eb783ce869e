"""What the fabric did: which transport joined which ranks, read from the lines NCCL prints while it sets itself up.

`read` takes blocks of lines and gives a frozen `Transport`; `lines` says it to a person, `document` to a machine.
"""

from holdfast.diagnose.transport.document import document
from holdfast.diagnose.transport.reading import read
from holdfast.diagnose.transport.result import Communicator, Evidence, Link, Member, Transport, Verdict, Way
from holdfast.diagnose.transport.words import lines

__all__ = ["Communicator", "Evidence", "Link", "Member", "Transport", "Verdict", "Way", "document", "lines", "read"]
