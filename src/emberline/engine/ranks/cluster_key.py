"""How nodes show each other that they know the cluster key. This module does not import torch.

The key itself is not sent. What is sent afterwards is neither encrypted nor signed."""

from __future__ import annotations

import hmac
import os

from emberline.core.config import cluster_key_from_environment
from emberline.core.engine_config import EngineConfig
from emberline.core.errors import InvalidRequest, WrongClusterKey
from emberline.engine.ranks.node_messages import NodeSocket

KEY_HINT = "set EMBERLINE_CLUSTER_KEY to the same value on all nodes"
GREETING = b"emberline-node"
NONCE_BYTES = 32


def read_cluster_key(config: EngineConfig) -> str:
    """Return the cluster key, a secret that all nodes share. Raises InvalidRequest if it is not set."""
    if (key := cluster_key_from_environment()) is None:
        message = f"nodes is {config.parallel.nodes}, but there is no cluster key, with which nodes identify themselves"
        raise InvalidRequest(message, param="nodes", hint=KEY_HINT)
    return key


def authenticate_node(node: NodeSocket, key: str) -> None:
    """On node 0: check that the other side knows the key. Raises WrongClusterKey, or OSError if it disconnects."""
    greeting = node.receive_bytes()
    if not greeting.startswith(GREETING) or len(greeting) != len(GREETING) + NONCE_BYTES:
        raise ConnectionError("the other side is not an Emberline node")
    nonces = greeting + os.urandom(NONCE_BYTES)
    node.send_bytes(nonces[len(greeting) :] + _prove(key, b"master", nonces))
    if not hmac.compare_digest(node.receive_bytes(), _prove(key, b"node", nonces)):
        raise WrongClusterKey("the node has another cluster key than node 0", hint=KEY_HINT)


def authenticate_master(master: NodeSocket, key: str) -> None:
    """On another node: prove that this side knows the key, and check that node 0 does.

    Raises WrongClusterKey, or OSError if node 0 disconnects."""
    greeting = GREETING + os.urandom(NONCE_BYTES)
    master.send_bytes(greeting)
    answer = master.receive_bytes()
    nonces = greeting + answer[:NONCE_BYTES]
    master.send_bytes(_prove(key, b"node", nonces))
    if not hmac.compare_digest(answer[NONCE_BYTES:], _prove(key, b"master", nonces)):
        raise WrongClusterKey("node 0 has another cluster key than this node", hint=KEY_HINT)


def _prove(key: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key.encode(), side + nonces, "sha256")
