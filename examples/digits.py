"""Learn to read handwritten digits with several processes that share the work.

Every process (a rank) holds the same model and sees its own share of each batch. The ranks add up their gradients
over plain sockets and all take the same step, so the models stay equal, bit for bit. Only NumPy and scikit-learn's
bundled data set (1,797 scans of 8 x 8 pixels) are needed: no framework, no download.

    phalanx run --nproc-per-node 4 examples/digits.py      # four ranks
    python examples/digits.py                              # one rank, nothing to talk to

A launcher tells each rank who it is by RANK and WORLD_SIZE, and where rank 0 listens by MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

if TYPE_CHECKING:
    from types import TracebackType

Floats = NDArray[np.float64]
Address = tuple[str, int]

SEED = 7
TEST_SIZE = 360
BATCH = 128  # over all ranks: each takes its share, so the result does not depend on how many there are
EPOCHS = 30
LEARNING_RATE = 2.0
PATIENCE = 60.0  # seconds to wait for a peer before giving up


class AllReduce:
    """Adds arrays over all ranks, in place.

    Rank 0 receives every other rank's array, adds them in the order of the ranks, and sends the sum back. Rounding
    depends on the order of additions; since one rank adds for all, every rank gets the same bits.

    Used as a context: entering it meets the other ranks, leaving it closes the connections.
    """

    def __init__(self, rank: int, world_size: int, address: Address) -> None:
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self._peers: list[socket.socket] = []  # of rank 0: all others, by rank; of the others: rank 0
        self._sockets = ExitStack()

    def __enter__(self) -> Self:
        if self.world_size > 1:
            self._peers = self._accept_others() if self.rank == 0 else [self._connect_to_rank_0()]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._sockets.close()

    def sum(self, array: Floats) -> None:
        """Replace `array` by its sum over all ranks; shape and type must be the same on all of them."""
        mine = array.data.cast("B")
        if self.rank == 0:
            theirs = np.empty_like(array)
            for peer in self._peers:
                receive(peer, theirs.data.cast("B"))
                array += theirs
            for peer in self._peers:
                peer.sendall(mine)
        else:
            (rank_0,) = self._peers
            rank_0.sendall(mine)
            receive(rank_0, mine)

    def _accept_others(self) -> list[socket.socket]:
        arrived: dict[int, socket.socket] = {}
        with socket.create_server(self.address, backlog=self.world_size) as listener:
            listener.settimeout(PATIENCE)
            while len(arrived) < self.world_size - 1:
                peer = self._sockets.enter_context(listener.accept()[0])
                peer.settimeout(PATIENCE)
                hello = bytearray(4)
                receive(peer, memoryview(hello))
                arrived[int.from_bytes(hello, "big")] = peer
        return [arrived[rank] for rank in range(1, self.world_size)]

    def _connect_to_rank_0(self) -> socket.socket:
        rank_0 = self._sockets.enter_context(connect(self.address))
        rank_0.sendall(self.rank.to_bytes(4, "big"))
        return rank_0


def connect(address: Address) -> socket.socket:
    """Connect to `address`; while nobody listens there yet, try again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)  # TCP has no event that says "somebody listens now"


def receive(peer: socket.socket, buffer: memoryview) -> None:
    """Fill `buffer` from `peer`."""
    while buffer:
        count = peer.recv_into(buffer)
        if not count:
            message = "a peer closed its connection in the middle of the training"
            raise ConnectionError(message)
        buffer = buffer[count:]


def load() -> tuple[Floats, NDArray[np.intp]]:
    """Return the scans, one per row with a 1 appended as the input of the bias, and the digit that each one shows."""
    pixels, digits = load_digits(return_X_y=True)
    return np.column_stack([pixels / 16.0, np.ones(len(pixels))]), digits


def softmax(scores: Floats) -> Floats:
    """Turn each row of scores into probabilities."""
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(odds / odds.sum(axis=1, keepdims=True))


def train(pixels: Floats, digits: NDArray[np.intp], all_reduce: AllReduce) -> Floats:
    """Fit a softmax regression by gradient descent on this rank's share of each batch; return its weights."""
    random = np.random.default_rng(SEED)  # the same on every rank: they agree on the batches without a word
    wanted = np.eye(10)[digits]
    weights = np.zeros((pixels.shape[1], 10))
    batches = len(pixels) // BATCH
    for epoch in range(1, EPOCHS + 1):
        order = random.permutation(len(pixels))[: batches * BATCH].reshape(batches, BATCH)
        losses = []
        for share in order[:, all_reduce.rank :: all_reduce.world_size]:
            guess = softmax(pixels[share] @ weights)
            gradient = pixels[share].T @ (guess - wanted[share])
            all_reduce.sum(gradient)
            weights -= LEARNING_RATE / BATCH * gradient
            losses.append(-np.log(guess[wanted[share] == 1]).mean())
        if epoch % 10 == 0 or epoch == 1:
            print(f"epoch {epoch} loss {np.mean(losses):.3f}")
    return weights


def main() -> None:
    """Train, then test on digits that no rank has trained on."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))

    pixels, digits = load()
    shuffled = np.random.default_rng(SEED).permutation(len(pixels))
    test, rest = shuffled[:TEST_SIZE], shuffled[TEST_SIZE:]
    with AllReduce(rank, world_size, address) as all_reduce:
        weights = train(pixels[rest], digits[rest], all_reduce)

    print(f"rank {rank} of {world_size} done, weights {zlib.crc32(weights.tobytes()):08x}")
    if rank == 0:
        accuracy = np.mean((pixels[test] @ weights).argmax(axis=1) == digits[test])
        print(f"test accuracy {accuracy:.3f} over {TEST_SIZE} digits, {world_size} ranks")


if __name__ == "__main__":
    main()
