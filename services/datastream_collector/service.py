"""Wiring of the datastream collector: its actor on the host, its effects on the archive file."""

from __future__ import annotations

from common.addresses import Role
from common.host import Host
from services.datastream_collector.archive import ArchiveError, FrameArchive
from services.datastream_collector.core import (
    ArchiveAppend,
    ArchiveFailed,
    ArchiveOpen,
    ArchiveOpened,
    ArchiveWritten,
    CollectorActor,
    EndpointFailed,
    FramesCollected,
)
from services.datastream_collector.stream_socket import EndpointError, StreamSocket

WAY_OUT = "set [observability] datastream_frame_log to a file that can be written"


class ArchiveSink:
    """Performs the archive effects at once, in the loop: write() goes to the page cache, and a disk that hangs stops
    this process alone. Then its sessions give no more credit, and producers hold, bounded, and say what they lost."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._archive: FrameArchive | None = None

    def open(self, actor: bytes, effect: ArchiveOpen) -> None:
        """S1 10.11: what fails here is a startup failure."""
        try:
            self._archive = FrameArchive(effect.path, effect.max_bytes)
        except ArchiveError as error:
            self._host.deliver(actor, ArchiveFailed(f"{error}; {WAY_OUT}"))
        else:
            self._host.deliver(actor, ArchiveOpened(self._archive.recovered))

    def append(self, actor: bytes, effect: ArchiveAppend) -> None:
        """Each frame by itself: one that fails does not take the others with it."""
        failed, first_error = 0, ""
        for frame in effect.frames:
            try:
                if self._archive is None:
                    raise OSError("the archive is closed")
                self._archive.append(frame)
            except OSError as error:
                failed += 1
                first_error = first_error or f"cannot write the frame archive: {error.strerror or error}"
        self._host.deliver(actor, ArchiveWritten(len(effect.frames) - failed, failed, first_error))


def build(host: Host) -> None:
    """Spawn the collector on its host; open its stream socket beside the bus file."""
    sink = ArchiveSink(host)
    host.on_effect(ArchiveOpen, sink.open)
    host.on_effect(ArchiveAppend, sink.append)
    actor = CollectorActor()
    address = host.spawn(actor, name=Role.COLLECTOR)
    try:
        stream = StreamSocket(host.loop, actor, host.bus_file.run_dir, host.boot, host.call_soon)
    except EndpointError as error:
        host.on_effect(FramesCollected, lambda _, __: None)
        host.deliver(address, EndpointFailed(str(error)))
    else:
        host.on_effect(FramesCollected, lambda _, __: stream.frames_collected())
