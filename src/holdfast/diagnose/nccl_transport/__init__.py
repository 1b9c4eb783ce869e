"""The fabric's set-up: which transport connected which ranks, read from the lines that NCCL prints.

`read` takes chunks of lines and returns a frozen `Transport`; `lines` renders it as text, `document` as JSON data, and
`facts` as input to the root-cause analysis.
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
