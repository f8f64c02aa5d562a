"""Checkpoints of one rank on a disk: blocked, durable, cold and warm load, beside the floors and the peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import floors
from ours import Ours, timed
from peers import ASYNCHRONOUS, LOADING, SYNCHRONOUS, DcpReused, Peer, drop_failed, open_peers
from rows import Effort, Row
from state import adam, nbytes_of, tiny


def measure(place: Path, nbytes: int, effort: Effort, notes: list[str]) -> list[Row]:
    """All rows of one size. Each of the three parts has the whole effort."""
    size = f"{nbytes / 2**20:.0f} MiB"
    first = _first_saves(place / "first", nbytes, size, effort, notes)
    later = _saves(place / "saves", nbytes, size, effort, notes)
    return [*first, *later, *_loads(place / "loads", nbytes, size, effort, notes)]


def _round_of(peers: list[Peer], work: Callable[[Peer], object], notes: list[str]) -> None:
    for peer in list(peers):
        try:
            work(peer)
        except Exception as error:  # noqa: BLE001  # a peer that fails is no reason to measure nothing
            drop_failed(peers, peer, error, notes)


def _first_saves(place: Path, nbytes: int, size: str, effort: Effort, notes: list[str]) -> list[Row]:
    """The first save of a run, of a new one in every round."""
    place.mkdir(parents=True)
    state = adam(nbytes)
    nbytes = nbytes_of(state)
    source, sink = floors.Memory(nbytes), floors.Memory(nbytes)
    copy = floors.best_memcpy(sink, source)
    row = Row(f"{size}: blocked, first save (x memcpy)", 1.15)
    prepare = Row(f"{size}: arena built in the background (x memcpy)")
    _warm_up(place)
    for number in effort.rounds([row], f"{size}: first saves"):
        ours = Ours(place / f"ours-{number}", state)
        ours.prepare()
        floor = copy()
        blocked, _ = ours.save()
        row.add(blocked, floor)
        prepare.add(ours.run.stats.prepare_seconds, floor)
        ours.close()
        peers: list[Peer] = open_peers((DcpReused,), place, state, notes)

        def save(peer: Peer) -> None:
            row.add_peer(peer.name, peer.save(state)[0])

        _round_of(peers, save, notes)
        for peer in peers:
            peer.close()
    return [row, prepare]


def _warm_up(place: Path) -> None:
    """The first save of a process imports things; that is not what the first save of a run costs."""
    ours, peer = Ours(place / "warm-up", tiny()), DcpReused(place)
    ours.prepare()
    ours.save()
    peer.save(tiny())
    ours.close()
    peer.close()


def _saves(place: Path, nbytes: int, size: str, effort: Effort, notes: list[str]) -> list[Row]:
    place.mkdir(parents=True)
    state = adam(nbytes)
    nbytes = nbytes_of(state)
    blocked = Row(f"{size}: blocked, later saves (x memcpy)", 1.15)
    durable = Row(f"{size}: durable (x direct write)", 1.10)
    ours = Ours(place / "ours", state)
    ours.prepare()
    memory = Row(f"{size}: arena beyond the state", 64, unit="MiB", absolute=True, exact=True)
    memory.add((ours.run.stats.arena_bytes - nbytes) / 2**20)
    ours.save()
    source, sink = floors.Memory(nbytes), floors.Memory(nbytes)
    copy, write = floors.best_memcpy(sink, source), floors.best_write(place / "floor", source)
    peers = open_peers((*SYNCHRONOUS, *ASYNCHRONOUS), place, state, notes)
    _round_of(peers, lambda peer: peer.save(state), notes)  # the first save of each has a row of its own

    def save(peer: Peer) -> None:
        seconds = peer.save(state)
        blocked.add_peer(peer.name, seconds[0])
        durable.add_peer(peer.name, seconds[1])

    for _ in effort.rounds([blocked, durable], f"{size}: saves"):
        copied, (block_seconds, durable_seconds), written = copy(), ours.save(), write()
        blocked.add(block_seconds, copied)
        durable.add(durable_seconds, written)
        _round_of(peers, save, notes)
    for peer in peers:
        peer.close()
    ours.close()
    return [blocked, durable, memory]


def _loads(place: Path, nbytes: int, size: str, effort: Effort, notes: list[str]) -> list[Row]:
    place.mkdir(parents=True)
    state, target = adam(nbytes), adam(nbytes)
    nbytes = nbytes_of(state)
    ours = Ours(place / "ours", state)
    ours.prepare()
    ours.save()
    ours.close()
    peers = open_peers(LOADING, place, state, notes)
    _round_of(peers, lambda peer: peer.save(state), notes)
    # The same file, as another may lie better or worse on the disk; it has all bytes but the objects'.
    plain = max(ours.path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
    sink = floors.Memory(plain.stat().st_size)
    cold = Row(f"{size}: load, cold (x cold read)", 1.15)
    warm = Row(f"{size}: load, warm (x warm read)", 1.3)
    reads = {cold.name: floors.best_read(plain, sink, cold=True), warm.name: floors.best_read(plain, sink, cold=False)}
    for _ in effort.rounds([cold, warm], f"{size}: loads"):
        for row, prepare in ((cold, floors.drop_cache), (warm, floors.warm_cache)):

            def load(peer: Peer, row: Row = row, prepare: Callable[[list[Path]], None] = prepare) -> None:
                prepare([peer.path])
                row.add_peer(peer.name, timed(lambda: peer.load(target))[0])

            floor = reads[row.name]()
            prepare([ours.path])
            row.add(timed(lambda: ours.load(target))[0], floor)
            _round_of(peers, load, notes)
    for peer in peers:
        peer.close()
    return [cold, warm]
