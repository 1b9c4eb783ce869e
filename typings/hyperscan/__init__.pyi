"""What of hyperscan holdfast uses; the library's own types leave some of it open."""

from collections.abc import Callable, Sequence

HS_FLAG_MULTILINE: int
HS_FLAG_SINGLEMATCH: int

class Database:
    def compile(
        self, *, expressions: Sequence[bytes], ids: Sequence[int], elements: int, flags: Sequence[int]
    ) -> None: ...
    def scan(
        self, data: bytes, *, match_event_handler: Callable[[int, int, int, int, object], bool | None]
    ) -> None: ...
