"""RemoteNodes: on node 0, the other nodes of a group and their ranks."""

from __future__ import annotations

from emberline.core.engine_config import EngineConfig
from emberline.core.errors import EmberlineError, EngineFailed
from emberline.engine.messages import Rejection
from emberline.engine.ranks.control import RankMessage, encode_rank_message
from emberline.engine.ranks.layout import Layout
from emberline.engine.ranks.node_listener import NodeLauncher, NodeLink, NodeListener
from emberline.engine.ranks.node_messages import GroupEnded, MasterBeat, NodeGoodbye, NodeMessage, NodePlan, ToRanks
from emberline.kernels.comm.rank_lost import RankLost

GOODBYE_TIMEOUT_S = 1.0  # for a node to close its connection after the last message
FAILURE_TIMEOUT_S = 0.1  # the same after a failure, which may be that the node cannot be reached


class RemoteNodes:
    def __init__(self, config: EngineConfig, layout: Layout, launcher: NodeLauncher | None = None) -> None:
        """Wait until all other nodes have joined, and let them start their ranks. The caller must call `close`.

        Raises EmberlineError if node 0 cannot listen at its address, or a node does not join."""
        self._layout = layout
        self._listener = NodeListener(config, layout, launcher)
        self.rendezvous = self._listener.rendezvous
        self.links: list[NodeLink] = []
        try:
            self.links = self._listener.wait_for_nodes()
            for link in self.links:
                link.send_if_open(self._listener.start_message)
        except EmberlineError as error:
            self.links = self._listener.links
            self.close(error)
            raise
        except BaseException:  # such as KeyboardInterrupt
            self.links = self._listener.links
            self.close(None)
            raise

    def send(self, message: RankMessage) -> None:
        """Send a message to all ranks of these nodes, and ignore closed connections: RankGroup's thread finds them."""
        body = encode_rank_message(message)
        for link in self.links:
            link.send_if_open(ToRanks(body))

    def publish(self, plan: bytes) -> None:
        """Send a plan once to each node. Raises RankLost."""
        message = NodePlan(plan)
        for link in self.links:
            try:
                link.socket.send(message)
            except OSError as error:
                raise RankLost(f"{self._layout.describe_node(link.node)} cannot receive plans: {error}") from error

    def check(self, seconds: float, limit_s: float, is_ready: bool) -> NodeLink | None:
        """Send a heartbeat to each node; return a node that has sent nothing for `limit_s`, or None.

        `seconds`: time since the previous call. `is_ready`: whether all ranks wait for plans; the heartbeat tells the
        nodes."""
        silent = None
        for link in self.links:
            link.socket.try_send(MasterBeat(is_ready))
            link.silent_s += seconds
            if link.silent_s > limit_s:
                silent = link
        return silent

    def end(self, error: EmberlineError | None) -> None:
        """Let the nodes end their ranks, and end the connections. `error`: the reason; None: the engine shuts down."""
        self._listener.stop()  # nodes that join again get a connection to the next engine process
        for link in self.links:
            link.socket.try_send(_last_message(error))
            link.socket.end()

    def close(self, error: EmberlineError | None) -> None:
        """Let the nodes end their ranks, wait for them, then close the connections and the listener.

        The wait is limited. `error`: the reason; None: the engine shuts down."""
        timeout_s = FAILURE_TIMEOUT_S if isinstance(error, EngineFailed) else GOODBYE_TIMEOUT_S
        for link in self.links:
            link.socket.finish(_last_message(error), timeout_s)
            link.socket.close()
        self._listener.close()


def _last_message(error: EmberlineError | None) -> NodeMessage:
    """Return the last message to a node.

    After EngineFailed, the node then joins the next group. Otherwise, it ends."""
    if error is None:
        return NodeGoodbye()
    return GroupEnded(error.message) if isinstance(error, EngineFailed) else Rejection.from_error("", error)
