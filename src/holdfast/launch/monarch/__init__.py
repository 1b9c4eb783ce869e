"""The orchestrator `monarch`: agents run in process meshes of Monarch, which starts and watches their processes."""
