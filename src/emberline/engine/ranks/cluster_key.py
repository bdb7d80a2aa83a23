"""How nodes show each other that they know a cluster key. This module does not import torch.

No key itself is sent. What is sent afterwards is neither encrypted nor signed."""

from __future__ import annotations

import hmac
import os

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, WrongClusterKey
from emberline.core.keys import read_cluster_keys
from emberline.engine.ranks.node_messages import NodeSocket

KEY_HINT = "set EMBERLINE_CLUSTER_KEY to the same value on all nodes"
GREETING = b"emberline-node"
NONCE_BYTES, PROOF_BYTES = 32, 32


def read_node_keys(config: EngineConfig) -> tuple[str, ...]:
    """Return the cluster keys, one of which all nodes share. Raises InvalidRequest if there are none."""
    if not (keys := read_cluster_keys()):
        message = f"nodes is {config.parallel.nodes}, but there is no cluster key, with which nodes identify themselves"
        raise InvalidRequest(message, param="nodes", hint=KEY_HINT)
    return keys


def authenticate_node(node: NodeSocket, keys: tuple[str, ...]) -> None:
    """On node 0: check that the other side knows one of the keys.

    Raises WrongClusterKey, or OSError if it disconnects."""
    greeting = node.receive_bytes()
    if not greeting.startswith(GREETING) or len(greeting) != len(GREETING) + NONCE_BYTES:
        raise ConnectionError("the other side is not an Emberline node")
    nonces = greeting + os.urandom(NONCE_BYTES)
    node.send_bytes(nonces[len(greeting) :] + b"".join(_prove(key, b"master", nonces) for key in keys))
    if _find_key(keys, b"node", nonces, node.receive_bytes()) is None:
        raise WrongClusterKey("the node has another cluster key than node 0", hint=KEY_HINT)


def authenticate_master(master: NodeSocket, keys: tuple[str, ...]) -> None:
    """On another node: check that node 0 knows one of the keys, and prove that this side knows it too.

    Raises WrongClusterKey, or OSError if node 0 disconnects."""
    greeting = GREETING + os.urandom(NONCE_BYTES)
    master.send_bytes(greeting)
    answer = master.receive_bytes()
    nonces, proofs = greeting + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    parts = [proofs[at : at + PROOF_BYTES] for at in range(0, len(proofs), PROOF_BYTES)]
    key = next((found for part in parts if (found := _find_key(keys, b"master", nonces, part))), None)
    master.send_bytes(_prove(key or keys[0], b"node", nonces))
    if key is None:
        raise WrongClusterKey("node 0 has another cluster key than this node", hint=KEY_HINT)


def _find_key(keys: tuple[str, ...], side: bytes, nonces: bytes, proof: bytes) -> str | None:
    """Return the key that the other side has proved to know; None if it is none of them."""
    return next((key for key in keys if hmac.compare_digest(proof, _prove(key, side, nonces))), None)


def _prove(key: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key.encode(), side + nonces, "sha256")
