"""What the fabric did: which transport joined which ranks, read from the lines NCCL prints while it sets itself up.

`read` takes blocks of lines and gives a frozen `Transport`; `lines` says it to a person, `document` to a machine, and
`facts` to the reasoning about what went wrong.
"""

from holdfast.diagnose.nccl_transport.setup_log_reader import SetupLogReader, read_setup_logs
from holdfast.diagnose.nccl_transport.transport_dict import to_dict
from holdfast.diagnose.nccl_transport.transport_facts import is_fabric_ok, to_facts
from holdfast.diagnose.nccl_transport.transport_report import (
    CommRank,
    Communicator,
    FabricVerdict,
    Link,
    LinkType,
    LogLine,
    TransportReport,
)
from holdfast.diagnose.nccl_transport.transport_text import format_transport

__all__ = [
    "CommRank",
    "Communicator",
    "FabricVerdict",
    "Link",
    "LinkType",
    "LogLine",
    "SetupLogReader",
    "TransportReport",
    "format_transport",
    "is_fabric_ok",
    "read_setup_logs",
    "to_dict",
    "to_facts",
]
