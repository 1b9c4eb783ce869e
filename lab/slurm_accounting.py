"""Slurm's accounting for a cluster of the lab: MariaDB and slurmdbd, with the configuration of the latter."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge}
DbdHost=localhost
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
"""


class SlurmAccounting:
    """The accounting of one cluster; its daemons are started by `spawn`, with further variables."""

    def __init__(self, folder: Path, root: Path, port: int, munge: Path) -> None:
        self._folder = folder / "accounting"
        self._root = root
        self._port = port
        conf = folder / "slurmdbd.conf"
        conf.write_text(_CONF.format(munge=munge, port=port, folder=self._folder))
        conf.chmod(0o600)  # slurmdbd refuses others

    def start(self, spawn: Callable[..., None], wait_for: Callable[[Callable[[], bool], str], None]) -> None:
        """Start both daemons, and wait until slurmdbd answers."""
        data, database = self._folder / "data", self._folder / "database"
        self._folder.mkdir()
        empty = next(self._root.glob("var/lib/m*/mysql")).parent  # the name of the folder differs between releases
        shutil.copytree(empty, data)
        options = ("--no-defaults", "--user=root", f"--datadir={data}", f"--socket={database}", "--skip-networking")
        # Else slurmdbd creates it, and on that connection Debian 13's client library refuses every result afterwards.
        (data / "slurm_acct_db").mkdir()
        # Nothing of it outlives the cluster.
        spawn("mariadbd", *options, "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M")
        wait_for(database.exists, "mariadbd")
        spawn("slurmdbd", "-D", MYSQL_UNIX_PORT=str(database))
        wait_for(self._answers, "slurmdbd")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
