"""The fabric's set-up: which transport connected which ranks, read from the lines that NCCL prints.

`SetupLogReader` takes chunks of lines and returns a frozen `TransportReport`; `format_transport` renders it as text,
`to_dict` as JSON data, and `to_facts` as input to the root-cause analysis. While a run lasts, `observations` reduces
the report of one node's ranks to events, and `judge` compares each with the promised fabric.
"""

from holdfast.diagnose.nccl_transport.node_observation import observations
from holdfast.diagnose.nccl_transport.promised_fabric import FabricJudgement, judge
from holdfast.diagnose.nccl_transport.setup_log_reader import SetupLogReader, read_setup_logs
from holdfast.diagnose.nccl_transport.transport_dict import to_dict
from holdfast.diagnose.nccl_transport.transport_facts import is_fabric_ok, to_facts
from holdfast.diagnose.nccl_transport.transport_report import TransportReport
from holdfast.diagnose.nccl_transport.transport_text import format_transport

__all__ = [
    "FabricJudgement",
    "SetupLogReader",
    "TransportReport",
    "format_transport",
    "is_fabric_ok",
    "judge",
    "observations",
    "read_setup_logs",
    "to_dict",
    "to_facts",
]
