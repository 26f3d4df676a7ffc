"""The router of Ray Serve's handle in a gateway: a call goes to the replica that it names.

Which replica gets a request is decided by the lease table, not here. Serve pickles this class by value, so it
imports what it shares with the gateway where it is used.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinnedRouter(RequestRouter):
    """A call with `at` goes to the replica of that id, and one without to any.

    A call to a replica that has ended goes to any, too, which answers that it is another one: Serve would
    look for it for ever, and keep later calls waiting behind it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank: the replica with the id `at`, or all."""
        at = None if pending_request is None else pending_request.kwargs.get("at")
        if pending_request is not None and hasattr(pending_request, "routing_context"):
            # Else Serve asks a busy replica for its queue without a pause.
            pending_request.routing_context.should_backoff = True
        pinned = [replica for replica in candidate_replicas if replica.replica_id.unique_id == at]
        return [pinned or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list of replicas that take requests has changed."""
        super().update_replicas(replicas)
        from plait.cluster.ray_serve.membership import MEMBERSHIP

        MEMBERSHIP.publish([replica.replica_id.unique_id for replica in replicas])
